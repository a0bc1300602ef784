//! `cargo xtask dist`: a tarball whose programs run on any Linux of this processor, without Rust.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use lm_measure::size;

use crate::bed::leftovers::{temporary_folder, watch_signals};
use crate::workspace::{cargo, root, run, said_by, target_dir};

/// What is in the tarball beside the programs.
const DOCUMENTS: &str = "admission/config.example.toml admission/lm-admissiond.service README.md docs/running.md \
    ARCHITECTURE.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE";
const PROGRAMS: &str = "lm-send lm-recv lm-bench lm-admissiond";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Packs the folder `$0`, with what lies in the folder `$1` and documents, into `tarball` in the folder `$2`; unpacks it
/// elsewhere, and starts every program, which must need no library and no loader, with an empty environment.
const PACK: &str = r#"
name=$0 built=$1 staging=$2
fail() { echo "$*" >&2; exit 1; }
mkdir -p "$staging/$name" "$staging/elsewhere"
cp $documents "$staging/$name"
for program in $programs; do cp "$built/$program" "$staging/$name"; done
tar --sort=name --owner=0 --group=0 --numeric-owner -czf "$staging/tarball" -C "$staging" "$name"
tar -xzf "$staging/tarball" -C "$staging/elsewhere"
for program in $programs; do
    path=$staging/elsewhere/$name/$program
    ldd "$path" 2>&1 | grep -qE 'statically linked|not a dynamic executable' \
        || fail "$path is linked dynamically; is a static libc installed (libc6-dev)?"
    said=$(cd / && env -i "$path" --version 2>&1) || fail "the packed $program --version failed: $said"
    echo "$said" | grep -qF "$version" || fail "the packed $program --version says $said"
done
"#;

/// Makes the tarball in `dist` of cargo's target folder.
pub fn dist() -> Result<()> {
    watch_signals()?;
    let said = said_by(Command::new("rustc").arg("-vV"))?;
    let target = said.lines().find_map(|line| line.strip_prefix("host: "));
    let target = target.context("`rustc -vV` names no host")?;
    // Naming the target keeps the flag away from build scripts and procedural macros, which cannot be static.
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-feature=+crt-static");
    run(cargo()
        .args("build --release --package lm-bench --package lm-admission".split(' '))
        .args(["--target", target])
        .args(PROGRAMS.split(' ').flat_map(|program| ["--bin", program]))
        .env("RUSTFLAGS", flags.trim()))?;
    let folder = target_dir()?;
    let output = folder.join("dist");
    std::fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
    let name = format!("lm-{VERSION}-{target}");
    let (staging, _staging) = temporary_folder(&folder, "dist")?;
    pack(&name, PROGRAMS, &folder.join(target).join("release"), &staging)?;
    let tarball = output.join(format!("{name}.tar.gz"));
    std::fs::rename(staging.join("tarball"), &tarball)
        .with_context(|| format!("cannot write {}", tarball.display()))?;
    println!(
        "{} ({})",
        tarball.display(),
        size::exact(tarball.metadata()?.len())
    );
    Ok(())
}

fn pack(name: &str, programs: &str, built: &Path, staging: &Path) -> Result<()> {
    let mut script = Command::new("sh");
    script.args(["-euc", PACK, name]).args([built, staging]);
    let values = [
        ("programs", programs),
        ("documents", DOCUMENTS),
        ("version", VERSION),
    ];
    said_by(script.envs(values).current_dir(root())).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_are_recognised() {
        // This test itself is linked dynamically, as every ordinary build is.
        let itself = std::env::current_exe().unwrap();
        let (staging, _staging) = temporary_folder(&std::env::temp_dir(), "dist").unwrap();
        let name = itself.file_name().unwrap().to_str().unwrap();
        let error = pack("lm", name, itself.parent().unwrap(), &staging).unwrap_err();
        assert!(error.to_string().contains("is linked dynamically; "), "{error}");
    }
}
