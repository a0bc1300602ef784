//! Frozen builds of this program, measured beside it: their ends do what `end` does here, told by the same [`Spec`](super::end::Spec).
//!
//! Both hosts are told the name and the file of each when they start. A client names a build; it cannot have any other file started.

use std::path::PathBuf;

use crate::cli::Failure;

/// What the names of their systems begin with.
pub(super) const PREFIX: &str = "lm@";

/// A build and the name it was given.
#[derive(Clone, Debug)]
pub(super) struct Frozen {
    pub(super) name: String,
    pub(super) program: PathBuf,
}

/// Reads `NAME=PATH`.
pub(super) fn parse(text: &str) -> Result<Frozen, String> {
    let (name, program) = text.split_once('=').ok_or("write NAME=PATH")?;
    // It becomes part of file names.
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    if name.is_empty() || !name.chars().all(fits) {
        return Err("a name has letters, digits, '.', '_' and '-'".to_owned());
    }
    let program = PathBuf::from(program);
    if !program.is_file() {
        return Err(format!("{} is no file; build it first", program.display()));
    }
    Ok(Frozen {
        name: name.to_owned(),
        program,
    })
}

/// The file of the build that a system is of.
pub(super) fn program(known: &[Frozen], system: &str) -> Result<PathBuf, Failure> {
    let name = system.strip_prefix(PREFIX);
    let found = known.iter().find(|frozen| Some(&*frozen.name) == name);
    found.map(|frozen| frozen.program.clone()).ok_or_else(|| {
        let name = name.unwrap_or(system);
        Failure::new(format!(
            "no build is called {name} here; start lm-bench serve with --frozen {name}=PATH"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_a_name_and_a_file() {
        let this = std::env::current_exe().unwrap();
        let known = parse(&format!("v1.0={}", this.display())).unwrap();
        assert_eq!((&*known.name, &known.program), ("v1.0", &this));
        for (text, why) in [
            ("v1.0", "NAME=PATH"),
            ("=/bin/true", "letters"),
            ("../x=/bin/true", "letters"),
            ("v1.0=/nowhere/lm-bench", "build it first"),
        ] {
            assert!(parse(text).unwrap_err().contains(why), "{text}");
        }
    }

    #[test]
    fn only_builds_that_a_host_was_told_of_are_started() {
        let program_of = |system| program(&[parse("v1=/bin/true").unwrap()], system);
        assert_eq!(program_of("lm@v1").unwrap(), PathBuf::from("/bin/true"));
        for system in ["lm@v2", "v1", "/bin/true", "lm@"] {
            let failure = program_of(system).unwrap_err();
            assert!(failure.text.contains("--frozen"), "{failure}");
        }
    }
}
