//! Compiles the shim against the DPDK that is installed.

fn main() {
    #[cfg(feature = "dpdk")]
    shim();
}

#[cfg(feature = "dpdk")]
fn shim() {
    use std::process::Command;

    println!("cargo::rerun-if-changed=src/shim.c");
    let asked = Command::new("pkg-config")
        .args(["--cflags", "--libs", "libdpdk >= 22.11"])
        .output();
    let Some(found) = asked.ok().filter(|output| output.status.success()) else {
        println!(
            "cargo::error=feature dpdk needs DPDK 22.11 or later: apt-get install libdpdk-dev dpdk-dev pkg-config"
        );
        return;
    };
    let found = String::from_utf8_lossy(&found.stdout);
    let mut shim = cc::Build::new();
    shim.file("src/shim.c");
    #[cfg(feature = "faults")]
    shim.define("LM_FAULTS", None);
    let mut libraries = Vec::new();
    for word in found.split_whitespace() {
        match (word.strip_prefix("-l"), word.strip_prefix("-L")) {
            (Some(library), _) => libraries.push(format!("cargo::rustc-link-lib={library}")),
            (_, Some(folder)) => println!("cargo::rustc-link-search={folder}"),
            _ if word.starts_with("-Wl,") => {}
            // DPDK's headers are code for the processor that its libraries are for: `-march` among these.
            _ => {
                shim.flag(word);
            }
        }
    }
    shim.warnings(true).compile("lm_dpdk_shim");
    // Behind what needs them.
    libraries.iter().for_each(|library| println!("{library}"));
}
