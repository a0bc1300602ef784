/// A mistake in `streaming.rs` or `showing.rs`: its name, the rule as it stands there, once, what stands there instead, and with what the
/// property begins that finds it.
pub struct Mutant {
    pub name: &'static str,
    pub rule: &'static str,
    pub mistake: &'static str,
    pub breaks: &'static str,
}

const fn mutant(
    name: &'static str,
    rule: &'static str,
    mistake: &'static str,
    breaks: &'static str,
) -> Mutant {
    Mutant {
        name,
        rule,
        mistake,
        breaks,
    }
}

/// The mistakes.
pub const MUTANTS: &[Mutant] = &[
    mutant(
        "tail shown before restore",
        "at.over_tail == 0 && tails.is_none_or(|tails| tails.is_readable(window))",
        "true",
        "S3",
    ),
    mutant(
        "entry reposted over shown",
        "self.is_held && (body && shown >= Part::Body || tail && shown == Part::Whole)",
        "false",
        "S3",
    ),
    mutant(
        "watermark read relaxed",
        "self.0.load(Ordering::Acquire)",
        "self.0.load(Ordering::Relaxed)",
        "S1",
    ),
    mutant(
        "watermark told relaxed",
        "self.0.store(release.to_u32(), Ordering::Release)",
        "self.0.store(release.to_u32(), Ordering::Relaxed)",
        "S1",
    ),
    mutant(
        "shown read relaxed",
        "self.parts[window as usize].load(Ordering::Acquire)",
        "self.parts[window as usize].load(Ordering::Relaxed)",
        "S3",
    ),
    mutant(
        "shown told relaxed",
        "self.parts[window as usize].store(part as u8, Ordering::Release)",
        "self.parts[window as usize].store(part as u8, Ordering::Relaxed)",
        "S3",
    ),
    mutant(
        "digest of another window",
        "first as usize..",
        "0..",
        "in the end released windows are shown",
    ),
    mutant(
        "digest not compared",
        "at.told.is_some() && at.told == at.found",
        "at.found.is_some()",
        "S3",
    ),
    mutant("release beyond written", "up_to > self.written", "false", "S1"),
    mutant(
        "finished before written",
        "self.written < self.grain.len",
        "false",
        "S1",
    ),
    mutant(
        "written into what is released",
        "bytes.start < writable.start",
        "false",
        "S2",
    ),
    mutant("turn to a stalled session", "!is_whole", "false", "S7"),
    mutant(
        "abort taken for end",
        "self.is_aborted = true",
        "self.windows = all",
        "S1",
    ),
    mutant(
        "leftover ignored in what is shown",
        "self.over_body > 0",
        "false",
        "S3",
    ),
    mutant(
        "leftover ignored in what is freed",
        "self.posted == 0",
        "true",
        "S6",
    ),
    mutant("freed under its reader", "!self.is_held", "true", "S6"),
    mutant(
        "delivered before all is shown",
        "outcome == Outcome::Whole && !is_shown()",
        "false",
        "S5",
    ),
    mutant(
        "shown with a fragment held aside",
        "at.is_in_place && is_verified",
        "is_verified",
        "S3",
    ),
];
