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
        "at.over_tail == 0 && tails.is_readable(window)",
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
        "a later window is shown before an earlier one",
    ),
    mutant(
        "digest not compared",
        "at.told.is_none() || at.told != at.found",
        "at.found.is_none()",
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
        "at.over_body > 0",
        "false",
        "S3",
    ),
    mutant(
        "leftover ignored in what is freed",
        "self.posted <= received",
        "true",
        "S6",
    ),
    mutant(
        "written over what is shown",
        "window.shown > Part::Nothing",
        "false",
        "S3",
    ),
    mutant(
        "delivered before all is shown",
        "ending == Ending::Whole",
        "false",
        "S5",
    ),
    mutant(
        "shown with a fragment held aside",
        "!at.is_in_place",
        "false",
        "S3",
    ),
    mutant(
        "shown before pairing is checked",
        "at.landed > Some(checked)",
        "false",
        "S3",
    ),
];
