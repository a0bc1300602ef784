//! Where random numbers come from: session keys, incarnations, the numbers of requests, the secret of introductions.

/// An endpoint's source of random numbers, for those that others must not guess and for those that must not come again.
#[derive(Debug)]
pub(crate) enum Entropy {
    /// The kernel.
    Kernel,
    /// A simulated world: the same numbers whenever it is run.
    Seeded(u64),
}

impl Entropy {
    /// The next 64 random bits.
    pub(crate) fn draw(&mut self) -> u64 {
        match self {
            Entropy::Kernel => from_kernel(),
            Entropy::Seeded(state) => split_mix(state),
        }
    }
}

fn from_kernel() -> u64 {
    let mut bytes = [0u8; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel gives no random numbers: {error}"),
        }
    }
    u64::from_ne_bytes(bytes)
}

/// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
