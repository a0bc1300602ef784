//! Kernel modules: found in a kernel's folder, decompressed, and put in the order in which they must be loaded.
//!
//! Debian makes `modules.dep` when it installs a kernel, and nothing is installed here: what a module needs stands in its own
//! `.modinfo` section (`depends=`, written by modpost).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use object::{Object as _, ObjectSection as _};

/// Modules that the checks and the tools use where the kernel has them: a bed's bridge, queueing disciplines, the impairment box.
pub const USEFUL: [&str; 6] = ["bridge", "tun", "dummy", "sch_ingress", "cls_bpf", "act_bpf"];

/// A decompressed module.
#[derive(Clone, Debug)]
pub struct Module {
    /// Its name with `_`, as `/proc/modules` shows it.
    pub name: String,
    /// The ELF file.
    pub image: Vec<u8>,
}

/// The modules of one kernel.
#[derive(Debug)]
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
    /// What the kernel itself has; `None` where nothing says so, as in Debian's packages.
    built_in: Option<Vec<String>>,
}

impl Modules {
    /// Looks for modules in a folder and all below it. `modules.builtin` there names what the kernel itself has.
    pub fn find(folder: &Path) -> Result<Modules> {
        let mut files = BTreeMap::new();
        let mut built_in = None;
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = std::fs::read_dir(&folder)
                .with_context(|| format!("cannot read the modules' folder {}", folder.display()))?;
            for entry in entries.flatten() {
                let path = entry.path();
                let kind = entry.file_type();
                if kind.is_ok_and(|kind| kind.is_dir()) {
                    folders.push(path);
                } else if let Some(name) = module_name(&path) {
                    files.insert(name, path);
                } else if path.file_name().is_some_and(|name| name == "modules.builtin") {
                    let text = std::fs::read_to_string(&path)
                        .with_context(|| format!("cannot read {}", path.display()))?;
                    let names = text.lines().filter_map(|line| module_name(Path::new(line)));
                    built_in.get_or_insert_with(Vec::new).extend(names);
                }
            }
        }
        if files.is_empty() {
            bail!(
                "no kernel module in {}; name the folder that has the kernel's *.ko files (--modules DIR)",
                folder.display()
            );
        }
        Ok(Modules { files, built_in })
    }

    /// The modules of these names and those they depend on, each after what it depends on. Built-in ones are left out.
    /// A required module that is missing is an error, an optional one is not.
    pub fn load_order(&self, required: &[&str], optional: &[&str]) -> Result<Vec<Module>> {
        let mut loaded: Vec<Module> = Vec::new();
        for name in required {
            self.add(name, &mut Vec::new(), &mut loaded)?;
        }
        for name in optional {
            let mut more = loaded.clone();
            if self.add(name, &mut Vec::new(), &mut more).is_ok() {
                loaded = more;
            }
        }
        Ok(loaded)
    }

    /// Depth first: what a module depends on goes before it.
    fn add(&self, name: &str, above: &mut Vec<String>, loaded: &mut Vec<Module>) -> Result<()> {
        let name = normal(name);
        if loaded.iter().any(|module| module.name == name) {
            return Ok(());
        }
        if above.contains(&name) {
            bail!("the modules {} depend on each other", above.join(", "));
        }
        let Some(path) = self.files.get(&name) else {
            // Where nothing tells, what is asked for may be built in: the check of the devices knows better. What a module needs
            // cannot: `depends=` names modules only.
            if self
                .built_in
                .as_ref()
                .map_or(above.is_empty(), |built_in| built_in.contains(&name))
            {
                return Ok(());
            }
            let above = above
                .last()
                .map_or(String::new(), |by| format!(", which {by} needs"));
            bail!("the kernel has no module {name}{above}; is --modules the folder of this kernel?");
        };
        let image = read(path)?;
        let needed = depends(&image).with_context(|| format!("cannot read {}", path.display()))?;
        above.push(name.clone());
        for needed in needed {
            self.add(&needed, above, loaded)?;
        }
        above.pop();
        loaded.push(Module { name, image });
        Ok(())
    }
}

/// The module in a file of that name; `None` when it is no module.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst"]
        .iter()
        .find_map(|ending| file.strip_suffix(ending))?;
    Some(normal(stem))
}

/// Modules are named with `-` or `_`, which are the same to the kernel.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// A module's file, decompressed.
fn read(path: &Path) -> Result<Vec<u8>> {
    let unreadable = || format!("cannot read the module {}", path.display());
    let bytes = std::fs::read(path).with_context(unreadable)?;
    let mut image = Vec::new();
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => lzma_rs::xz_decompress(&mut bytes.as_slice(), &mut image)
            .map_err(|error| anyhow::anyhow!("{error}"))
            .with_context(unreadable)?,
        Some("zst") => {
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(bytes.as_slice())
                .map_err(|error| anyhow::anyhow!("{error}"))
                .with_context(unreadable)?;
            std::io::Read::read_to_end(&mut decoder, &mut image).with_context(unreadable)?;
        }
        _ => image = bytes,
    }
    Ok(image)
}

/// The names after `depends=` in a module's `.modinfo` section, which consists of `NAME=VALUE`, each ended by a NUL.
fn depends(image: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(image).context("this is no ELF file")?;
    let section = file
        .section_by_name(".modinfo")
        .context("it has no .modinfo section, so it is no kernel module")?;
    Ok(parse_depends(section.data()?))
}

fn parse_depends(modinfo: &[u8]) -> Vec<String> {
    let entries = modinfo.split(|&byte| byte == 0);
    let values = entries.filter_map(|entry| entry.strip_prefix(b"depends="));
    let names = values.flat_map(|value| value.split(|&byte| byte == b','));
    names
        .filter(|name| !name.is_empty())
        .map(|name| normal(&String::from_utf8_lossy(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Relocatable ELF files with a `.modinfo` section, as the assembler makes them; compressed where `xz` or `zstd` is there.
    fn write_module(folder: &Path, name: &str, depends: &str) {
        let source = folder.join("source.s");
        let text = format!(".section .modinfo,\"a\"\n.asciz \"license=GPL\"\n.asciz \"depends={depends}\"\n");
        std::fs::write(&source, text).unwrap();
        let made = Command::new("cc")
            .args(["-c", "-o"])
            .arg(folder.join(format!("{name}.ko")))
            .arg(&source)
            .status()
            .unwrap();
        assert!(made.success());
    }

    fn compress(tool: &str, file: &Path) -> bool {
        let arguments: &[&str] = if tool == "xz" {
            &["--check=crc32", "--lzma2=dict=1MiB", "-f"]
        } else {
            &["-q", "-f", "--rm"]
        };
        Command::new(tool)
            .args(arguments)
            .arg(file)
            .status()
            .is_ok_and(|status| status.success())
    }

    #[test]
    fn modules_come_after_what_they_depend_on() {
        let folder = std::env::temp_dir().join(format!("xtask-modules-{}", std::process::id()));
        let below = folder.join("kernel/net");
        std::fs::create_dir_all(&below).unwrap();
        write_module(&below, "igb", "dca,i2c-algo-bit,hwmon");
        write_module(&below, "dca", "");
        write_module(&folder, "i2c-algo-bit", "dca");
        write_module(&folder, "broken", "gone");
        write_module(&folder, "one", "two");
        write_module(&folder, "two", "one");
        std::fs::write(folder.join("modules.builtin"), "kernel/drivers/hwmon/hwmon.ko\n").unwrap();
        // Where a tool is missing the file stays as it is, which is read as well.
        compress("xz", &folder.join("i2c-algo-bit.ko"));
        compress("zstd", &below.join("dca.ko"));

        let modules = Modules::find(&folder).unwrap();
        let order = |required: &[&str], optional: &[&str]| {
            let found = modules.load_order(required, optional)?;
            anyhow::Ok(found.into_iter().map(|module| module.name).collect::<Vec<_>>())
        };
        assert_eq!(
            order(&["igb", "dca"], &[]).unwrap(),
            ["dca", "i2c_algo_bit", "igb"]
        );
        assert_eq!(
            order(&["dca"], &["broken", "igb", "none"]).unwrap(),
            ["dca", "i2c_algo_bit", "igb"]
        );
        assert_eq!(order(&["hwmon"], &[]).unwrap(), Vec::<String>::new(), "built in");
        let error = order(&["broken"], &[]).unwrap_err().to_string();
        assert!(error.contains("no module gone, which broken needs"), "{error}");
        let error = order(&["one"], &[]).unwrap_err().to_string();
        assert!(error.contains("depend on each other"), "{error}");
        let of_below = Modules::find(&below).unwrap();
        assert!(
            of_below.load_order(&["virtio_pci"], &[]).unwrap().is_empty(),
            "nothing says what is built in"
        );
        assert!(
            of_below.load_order(&["igb"], &[]).is_err(),
            "a module that igb needs is not here"
        );
        let error = Modules::find(&below.join("none")).unwrap_err().to_string();
        assert!(error.contains("cannot read the modules' folder"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_or_a_file_without_modules_is_named() {
        let folder = std::env::temp_dir().join(format!("xtask-no-modules-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let error = Modules::find(&folder).unwrap_err().to_string();
        assert!(
            error.contains("no kernel module in") && error.contains("--modules"),
            "{error}"
        );
        for (name, content) in [
            ("text.ko", "text"),
            ("text.ko.xz", "text"),
            ("text.ko.zst", "text"),
        ] {
            std::fs::write(folder.join(name), content).unwrap();
            let error = Modules::find(&folder)
                .unwrap()
                .load_order(&["text"], &[])
                .unwrap_err();
            assert!(format!("{error:#}").contains(name), "{error:#}");
            std::fs::remove_file(folder.join(name)).unwrap();
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn module_information_is_a_list_of_assignments() {
        assert_eq!(
            parse_depends(b"license=GPL\0depends=a-b,c\0vermagic=7\0"),
            ["a_b", "c"]
        );
        assert_eq!(parse_depends(b"depends=\0"), Vec::<String>::new());
        assert_eq!(parse_depends(b""), Vec::<String>::new());
        assert_eq!(
            module_name(Path::new("a/i2c-algo-bit.ko.xz")).as_deref(),
            Some("i2c_algo_bit")
        );
        assert_eq!(module_name(Path::new("a/modules.order")), None);
    }
}
