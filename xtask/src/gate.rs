//! How the committed objects are made from their sources, and how to tell that one is stale.
//!
//! The same clang gives the same bytes anywhere: the sources include nothing, no path enters the object, and DWARF,
//! which would carry the compiler's name, is stripped (BTF stays). `NAME.sum` records the hashes of sources and object
//! and the compiler, so that a machine without clang can still see that one was changed without the other.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::bed::leftovers::temporary_folder;
use crate::workspace::{root, said_by};

/// The gate, the impairment box's forwarder, and the XDP program of bare AF_XDP: `NAME.o` and `NAME.sum` in a crate's
/// folder, and every file of its `src` that they are made from; the first one is compiled.
const ALL: [(&str, &str, &str); 3] = [
    ("gate", "ebpf", "gate.c gate.h"),
    ("impair", "bench/box", "impair.c"),
    ("redirect", "bench", "redirect.c"),
];

/// Rebuilds the object `$0` in this folder, or, with `check`, says whether it was made from the sources beside it: by the
/// first clang found, or by the one that made it. Where that is not here, hashes alone are compared.
const SCRIPT: &str = r#"
name=$0 to_do=$1 scratch=$2; shift 2
flags="-O2 -g -target bpf -mcpu=v3 -Wall -Wextra -Werror"
hash() { sha256sum "$1" | cut -d ' ' -f 1; }
version() { ! command -v "$1" >/dev/null || "$1" --version | head -n 1; }
fail() { echo "$*" >&2; exit 1; }
sum() {
    for source in $sources; do echo "source $source $(hash "src/$source")"; done
    echo "object $name.o $(hash "$1")"
    echo "flags $flags"
    echo "compiler $2"
}
sources=$* wanted=
if [ "$to_do" = check ]; then
    wanted=$(sed -n 's/^compiler //p' "$name.sum")
    [ -n "$wanted" ] || fail "$name.sum names no compiler: run \`cargo xtask gate\`"
    sum "$name.o" "$wanted" | cmp -s - "$name.sum" \
        || fail "the sources or the object of $name changed without each other: run \`cargo xtask gate\`"
fi
for end in -14 "" -15 -16 -17 -18 -19 -20; do
    compiler=$(version "clang$end")
    [ -n "$compiler" ] && [ "${wanted:-$compiler}" = "$compiler" ] && [ -n "$(version "llvm-strip$end")" ] || continue
    (cd src; "clang$end" $flags -fdebug-compilation-dir=. "-ffile-prefix-map=$(pwd -P)=." -c "$1" -o "$scratch/$name.o")
    "llvm-strip$end" -g "$scratch/$name.o"
    if [ "$to_do" = check ]; then
        cmp -s "$scratch/$name.o" "$name.o" || fail "$compiler makes another $name.o: run \`cargo xtask gate\`"
        echo "$name.o is fresh: rebuilt to the same bytes"
    else
        cp "$scratch/$name.o" "$name.o"
        sum "$name.o" "$compiler" >"$name.sum"
        echo "$name.o built by $compiler"
    fi
    exit
done
[ "$to_do" = check ] || fail "no clang with a matching llvm-strip is installed"
echo "$name.o matches its sources by hash (not rebuilt: $wanted is not installed)"
"#;

/// Rebuilds the committed objects.
pub fn build() -> Result<()> {
    ALL.iter()
        .try_for_each(|object| run(object, &root().join(object.1), "build"))
}

/// Whether each object was made from its sources.
///
/// # Errors
/// Which one was not.
pub(crate) fn check() -> Result<()> {
    ALL.iter()
        .try_for_each(|object| run(object, &root().join(object.1), "check"))
}

fn run((name, _, sources): &(&str, &str, &str), folder: &Path, to_do: &str) -> Result<()> {
    let (scratch, _scratch) = temporary_folder(&std::env::temp_dir(), name)?;
    let mut script = Command::new("sh");
    script.args(["-euc", SCRIPT, name, to_do]).arg(&scratch);
    let script = script.args(sources.split(' ')).current_dir(folder);
    print!("{}", said_by(script)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_are_fresh() {
        check().unwrap();
    }

    #[test]
    fn a_stale_object_is_noticed() {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "stale").unwrap();
        let copy = |name: &str| {
            let from = root().join(ALL[0].1).join(name);
            std::fs::copy(from, folder.join(name)).unwrap();
        };
        std::fs::create_dir_all(folder.join("src")).unwrap();
        for name in ["gate.o", "gate.sum", "src/gate.c", "src/gate.h"] {
            copy(name);
        }
        // In another folder the same compiler makes the same bytes.
        let fresh = run(&ALL[0], &folder, "check");
        let mut stale = Vec::new();
        for name in ["gate.o", "src/gate.c", "src/gate.h"] {
            let mut bytes = std::fs::read(folder.join(name)).unwrap();
            bytes.push(b'\n');
            std::fs::write(folder.join(name), bytes).unwrap();
            stale.push(run(&ALL[0], &folder, "check"));
            copy(name);
        }
        fresh.unwrap();
        assert!(
            stale.iter().all(|outcome| outcome
                .as_ref()
                .is_err_and(|why| why.to_string().contains("cargo xtask gate"))),
            "{stale:?}"
        );
    }
}
