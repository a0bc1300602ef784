//! What is judged of a machine, by table, and what is read of this one.

use super::*;

/// A machine on which zero-copy mode is safe.
fn sound() -> Facts {
    Facts {
        interface: "eth0".into(),
        driver: Some("igb".into()),
        mtu: 1500,
        rx_queues: 2,
        rx_ring_len: 256,
        xdp: Some(XdpFeatures {
            xdp: 0xb,
            ..XdpFeatures::default()
        }),
        free_huge_bytes: 64 * HUGE_PAGE_LEN,
        bounce_forced: false,
        confidential_guest: false,
        dma_mask_bits: Some(64),
        iommu_translates: false,
        memory_end: 1 << 36,
        rx_fcs: false,
        relaxed_ordering_at: None,
        kernel_release: "6.18.1".into(),
    }
}

const DEMAND: Demand = Demand {
    chunk_len: 4096,
    memory_len: 64 * HUGE_PAGE_LEN,
};

fn bad() -> Facts {
    Facts {
        mtu: 9000,
        rx_queues: 1,
        rx_ring_len: 4096,
        xdp: Some(XdpFeatures {
            xdp: 0x7,
            ..XdpFeatures::default()
        }),
        free_huge_bytes: 3 * HUGE_PAGE_LEN,
        bounce_forced: true,
        rx_fcs: true,
        relaxed_ordering_at: Some("0000:01:00.0".into()),
        kernel_release: "6.16.3-generic".into(),
        ..sound()
    }
}

/// Each line: what is changed of the sound machine, and what is said of it.
#[test]
fn each_fact_has_its_obstacle() {
    type Change = fn(&mut Facts);
    let table: [(Change, Option<&str>); 29] = [
        (|_| {}, None),
        (
            |facts| facts.xdp = Some(XdpFeatures::default()),
            Some(
                "eth0's driver (igb) has no zero-copy mode; use copy mode (--mode copy), or a card whose driver has \
                 zero-copy",
            ),
        ),
        // Linux before 6.3 does not tell.
        (|facts| facts.xdp = None, None),
        (
            |facts| facts.rx_ring_len = 4096,
            Some(
                "eth0's receive rings have 4096 descriptors, and 1024 can be kept full; shorten them (ethtool -G eth0 \
                 rx 1024), or use copy mode (--mode copy)",
            ),
        ),
        (
            |facts| facts.rx_queues = 1,
            Some(
                "eth0 has one receive queue, which other traffic needs; make more queues (ethtool -L eth0 combined 2), \
                 or use copy mode (--mode copy)",
            ),
        ),
        (
            |facts| facts.free_huge_bytes = 60 * HUGE_PAGE_LEN,
            Some(
                "128 MiB of huge pages are wanted and 120 free; reserve 4 more huge pages of 2 MiB (raise \
                 /proc/sys/vm/nr_hugepages), or use copy mode (--mode copy)",
            ),
        ),
        (
            |facts| facts.bounce_forced = true,
            Some(
                "received packets go through bounce buffers: the kernel's command line says so; remove swiotlb=force \
                 from the kernel's command line, or use copy mode (--mode copy)",
            ),
        ),
        (
            |facts| facts.confidential_guest = true,
            Some(
                "received packets go through bounce buffers: this guest's memory is encrypted; use copy mode (--mode \
                 copy)",
            ),
        ),
        (
            |facts| facts.dma_mask_bits = Some(32),
            Some(
                "received packets go through bounce buffers: the device reaches addresses of 32 bits, and there is \
                 memory beyond; switch the IOMMU on (intel_iommu=on, iommu.passthrough=0), or use copy mode (--mode \
                 copy)",
            ),
        ),
        (|facts| facts.dma_mask_bits = Some(36), None),
        (
            |facts| (facts.dma_mask_bits, facts.memory_end) = (Some(32), 1 << 32),
            None,
        ),
        (
            |facts| (facts.dma_mask_bits, facts.iommu_translates) = (Some(32), true),
            None,
        ),
        (|facts| facts.dma_mask_bits = None, None),
        (
            |facts| facts.rx_fcs = true,
            Some(
                "eth0 leaves the frame check sequence behind each packet; switch that off (ethtool -K eth0 rx-fcs \
                 off), or use copy mode (--mode copy)",
            ),
        ),
        (
            |facts| facts.relaxed_ordering_at = Some("0000:01:00.0".into()),
            Some(
                "the device at 0000:01:00.0 may write to memory out of order (relaxed ordering); forbid it (setpci -s \
                 0000:01:00.0 CAP_EXP+8.w=0000:0010), or use copy mode (--mode copy)",
            ),
        ),
        // igb takes 3 KiB of a chunk of 4096 bytes; others 3840 bytes.
        (|facts| facts.mtu = 3054, None),
        (
            |facts| facts.mtu = 3055,
            Some(
                "eth0 has MTU 3055, and frames hold 3054; lower it (ip link set eth0 mtu 3054), or use copy mode \
                 (--mode copy)",
            ),
        ),
        (
            |facts| (facts.mtu, facts.driver) = (3822, Some("ice".into())),
            None,
        ),
        (
            |facts| (facts.mtu, facts.driver) = (3823, None),
            Some(
                "eth0 has MTU 3823, and frames hold 3822; lower it (ip link set eth0 mtu 3822), or use copy mode \
                 (--mode copy)",
            ),
        ),
        (
            |facts| facts.kernel_release = "6.16.0".into(),
            Some(
                "kernel 6.16.0 can panic when AF_XDP sends in copy mode; update the kernel, or use zero-copy mode",
            ),
        ),
        (
            |facts| facts.kernel_release = "6.16.12-1-generic".into(),
            Some(
                "kernel 6.16.12-1-generic can panic when AF_XDP sends in copy mode; update the kernel, or use \
                 zero-copy mode",
            ),
        ),
        (
            |facts| facts.kernel_release = "6.17-rc3".into(),
            Some(
                "kernel 6.17-rc3 can panic when AF_XDP sends in copy mode; update the kernel, or use zero-copy mode",
            ),
        ),
        (
            |facts| facts.kernel_release = "6.17.0-8-generic".into(),
            Some(
                "kernel 6.17.0-8-generic can panic when AF_XDP sends in copy mode; update the kernel, or use zero-copy \
                 mode",
            ),
        ),
        (
            |facts| facts.kernel_release = format!("6.17.{FIRST_SOUND_6_17}"),
            None,
        ),
        (|facts| facts.kernel_release = "6.15.11".into(), None),
        (|facts| facts.kernel_release = "6.18.0-rc1".into(), None),
        (|facts| facts.kernel_release = "7.2.0+deb13".into(), None),
        (|facts| facts.kernel_release = "16.16.1".into(), None),
        (|facts| facts.kernel_release = "unknown".into(), None),
    ];
    for (line, (change, expected)) in table.into_iter().enumerate() {
        let mut facts = sound();
        change(&mut facts);
        let said: Vec<String> = judge(&facts, &DEMAND).iter().map(ToString::to_string).collect();
        let expected: Vec<&str> = expected.into_iter().collect();
        assert_eq!(said, expected, "line {line}");
    }
}

#[test]
fn everything_at_once_comes_in_a_stable_order() {
    let obstacles = judge(&bad(), &DEMAND);
    assert!(matches!(
        obstacles[..],
        [
            Obstacle::NoZeroCopy { .. },
            Obstacle::LongRing { .. },
            Obstacle::OneQueue { .. },
            Obstacle::NoHugePages { .. },
            Obstacle::BounceBuffers(Bounce::Forced),
            Obstacle::FcsKept { .. },
            Obstacle::RelaxedOrdering { .. },
            Obstacle::FrameTooLong { .. },
            Obstacle::KernelPanic { .. },
        ]
    ));
    let forbids: Vec<bool> = obstacles.iter().map(Obstacle::forbids_zero_copy).collect();
    assert_eq!(forbids, [true, true, true, true, true, true, true, true, false]);
    for obstacle in &obstacles {
        let text = obstacle.to_string();
        assert!(text.contains("; ") && !text.contains('\n'), "{text}");
    }
}

#[test]
fn memory_that_is_mapped_needs_no_more_pages() {
    let facts = Facts {
        free_huge_bytes: 0,
        ..sound()
    };
    let demand = |memory_len| Demand { memory_len, ..DEMAND };
    assert_eq!(judge(&facts, &demand(0)), []);
    assert_eq!(judge(&facts, &demand(1)).len(), 1);
}

#[test]
fn a_chunk_of_2048_bytes_is_too_short_for_igb() {
    let demand = Demand {
        chunk_len: 2048,
        ..DEMAND
    };
    assert_eq!(
        judge(&sound(), &demand),
        [Obstacle::FrameTooLong {
            interface: "eth0".into(),
            mtu: 1500,
            max_mtu: 1006
        }]
    );
    let virtio = Facts {
        driver: Some("virtio_net".into()),
        ..sound()
    };
    assert_eq!(judge(&virtio, &demand), []);
}

#[test]
fn the_command_line_forces_bounce_buffers_by_its_own_word() {
    for (line, forced) in [
        ("", false),
        ("ro quiet", false),
        ("ro swiotlb=force quiet", true),
        ("swiotlb=65536,force", true),
        ("swiotlb=65536,8,force\n", true),
        ("swiotlb=noforce", false),
        ("swiotlb=65536", false),
        ("xswiotlb=force", false),
        ("note=swiotlb=force", false),
    ] {
        assert_eq!(forces_bounce(line), forced, "{line}");
    }
}

#[test]
fn memory_ends_where_its_last_range_does() {
    let text = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n100000000-17fffffff : System RAM\n  \
                120000000-1207fffff : Kernel code\nfed00000-fed003ff : HPET 0\n200000000-3ffffffff : PCI Bus 0000:00\n";
    assert_eq!(last_ram(text), 0x1_8000_0000);
    assert_eq!(last_ram("00000000-00000000 : System RAM\n"), 0, "hidden");
    assert_eq!(last_ram("0-ffffffffffffffff : System RAM"), u64::MAX);
    assert_eq!(last_ram("nonsense\n : \n-- : System RAM"), 0);
}

#[test]
fn huge_pages_that_are_promised_are_not_free() {
    let folder = std::env::temp_dir().join(format!("lm-huge-{}", std::process::id()));
    assert_eq!(free_huge_pages(&folder), 0, "no such pages");
    std::fs::create_dir(&folder).expect("a folder of our own");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("the file");
    write("free_hugepages", "64\n");
    let without = free_huge_pages(&folder);
    write("nr_hugepages", "64\n");
    write("resv_hugepages", "60\n");
    let with = free_huge_pages(&folder);
    write("resv_hugepages", "65\n");
    write("nr_hugepages", "100\n");
    let more = free_huge_pages(&folder);
    write("resv_hugepages", &format!("{}\n", u64::MAX - 10));
    let negative = free_huge_pages(&folder);
    std::fs::remove_dir_all(&folder).expect("it is ours");
    assert_eq!((without, with, more, negative), (64, 4, 0, 64));
}

/// The real machine, as far as anything can be said of every machine.
#[test]
fn the_loopback_of_this_machine_is_refused() {
    let lo = Interface::by_name("lo").expect("every namespace has a loopback");
    let facts = Facts::read(&lo).expect("this machine's facts");
    assert_eq!((facts.interface.as_str(), facts.mtu), ("lo", lo.mtu));
    assert!(parse_release(&facts.kernel_release).is_some(), "{facts:?}");
    assert!(facts.memory_end > 1 << 24, "{facts:?}");
    assert_eq!((facts.dma_mask_bits, &facts.relaxed_ordering_at), (None, &None));
    let obstacles = judge(&facts, &DEMAND);
    assert!(
        obstacles
            .iter()
            .any(|obstacle| matches!(obstacle, Obstacle::FrameTooLong { mtu: 65536, .. })),
        "{obstacles:?}"
    );
}
