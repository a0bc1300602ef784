//! Whose the instructions of a row are: what QEMU's plugin (`xtask/plugin`) counted at which addresses, by the names that the guest's kernel and the
//! programs have for them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use object::{Object as _, ObjectSymbol as _, SymbolKind};
use serde::{Deserialize, Serialize};

use super::devices::Device;
use super::layers::{self, LAYERS};

/// Addresses from here on are the kernel's.
const KERNEL: u64 = 1 << 63;
/// Where a position-independent program begins (`ELF_ET_DYN_BASE` of arch/x86, `norandmaps`).
const PROGRAM: u64 = 0x5555_5555_4000;
/// Programs' libraries are beyond.
const LIBRARIES: u64 = 0x7000_0000_0000;
/// Functions of a row that are named.
const NAMED: usize = 15;

/// Instructions of all windows of a row, both processors', by whose they are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Instructions {
    /// Windows, one for each round that came to its end.
    pub windows: usize,
    /// Of programs, which are both ends.
    pub programs: u64,
    /// Of the kernel without the cards' driver.
    pub kernel: u64,
    /// Of the cards' driver.
    pub driver: u64,
    /// By [`LAYERS`].
    #[serde(default)]
    pub layers: [u64; LAYERS.len()],
    /// Where most were.
    pub functions: Vec<(String, u64)>,
}

/// A function: its name, and the module that it is in, which may be none.
type Function = (String, String);

/// Functions by where they begin.
#[derive(Debug, Default)]
pub(super) struct Symbols(BTreeMap<u64, Function>);

impl Symbols {
    /// Of the guest's kernel, as [`of_this_kernel`] has them, and of the program that does the work there.
    pub(super) fn of(kernel: &str, program: &[u8]) -> Result<Symbols> {
        let function = |line: &str| {
            let mut words = line.split(' ');
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            Some((
                address,
                (words.next()?.to_owned(), words.next().unwrap_or("").to_owned()),
            ))
        };
        let mut functions: BTreeMap<u64, Function> = kernel.lines().filter_map(function).collect();
        let file = object::File::parse(program).context("the guest's program is none")?;
        for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
            let name = format!("{:#}", rustc_demangle::demangle(symbol.name().unwrap_or("?")));
            functions.insert(PROGRAM + symbol.address(), (name, String::new()));
        }
        functions.insert(LIBRARIES, ("libraries".to_owned(), String::new()));
        Ok(Symbols(functions))
    }

    /// Adds up what the plugin wrote of a row. `has_names`: whether programs are those whose names these are.
    pub(super) fn add_up(&self, counted: &str, row: usize, device: Device, has_names: bool) -> Instructions {
        let mut sum = Instructions::default();
        let mut functions: BTreeMap<&str, u64> = BTreeMap::new();
        let mut is_its_own = false;
        for line in counted.lines() {
            let (Some((first, second)), unknown) = (line.split_once(' '), ("elsewhere", "")) else {
                continue;
            };
            if first == "window" {
                is_its_own = second.parse() == Ok(row);
                sum.windows += usize::from(is_its_own);
            }
            let (Ok(address), Ok(count)) = (u64::from_str_radix(first, 16), second.parse::<u64>()) else {
                continue;
            };
            if !is_its_own {
                continue;
            }
            let found = self.0.range(..=address).next_back();
            let (name, module) = found.map_or(unknown, |(_, (name, module))| (&**name, &**module));
            let (part, layer) = match address {
                ..KERNEL => (&mut sum.programs, layers::PROGRAMS),
                _ if device.modules().contains(&module) => (&mut sum.driver, layers::DRIVER),
                _ => (&mut sum.kernel, layers::of(name)),
            };
            *part += count;
            sum.layers[layer] += count;
            let name = if address < KERNEL && !has_names {
                "programs"
            } else {
                name
            };
            *functions.entry(name).or_default() += count;
        }
        let mut functions: Vec<(String, u64)> = functions
            .into_iter()
            .map(|(name, count)| (name.to_owned(), count))
            .collect();
        functions.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        functions.truncate(NAMED);
        sum.functions = functions;
        sum
    }
}

/// Functions of the kernel that this runs on, and of its modules: lines `ADDRESS NAME` and `ADDRESS NAME MODULE`.
pub(super) fn of_this_kernel() -> Result<String> {
    let all = std::fs::read_to_string("/proc/kallsyms").context("cannot read /proc/kallsyms")?;
    Ok(functions_in(&all))
}

/// Of `/proc/kallsyms` what is code, without what the compiler puts before each function (`__pfx_`).
fn functions_in(kallsyms: &str) -> String {
    let function = |line: &str| {
        let mut words = line.split_whitespace();
        let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
        let is_code = matches!(kind, "t" | "T" | "w" | "W") && !name.starts_with("__pfx_");
        let module = words.next().map_or(String::new(), |module| {
            format!(" {}", module.trim_matches(['[', ']']))
        });
        is_code.then(|| format!("{address} {name}{module}\n"))
    };
    kallsyms.lines().filter_map(function).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_their_functions_and_those_their_parts() {
        let kallsyms = "ffffffff81000000 T __pfx_start\nffffffff81000010 T xsk_sendmsg\nffffffff81000100 t schedule\n\
                        ffffffff82000000 D jiffies\nffffffffc0000000 t igb_poll\t[igb]\nffffffffc0001000 t veth_poll\t[veth]\n";
        let functions = functions_in(kallsyms);
        assert_eq!(functions.lines().count(), 4, "{functions}");
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let symbols = Symbols::of(&functions, &program).unwrap();
        let of_this = |(name, _): &Function| name == "xtask::vm::instructions::functions_in";
        assert!(symbols.0.values().any(of_this), "names are as they are written");
        let counted = "window 0\nffffffff81000010 1000\nwindow 1\nffffffff81000010 7\nffffffff810000f0 3\nffffffff81000100 5\n\
                       ffffffffc0000020 11\nffffffffc0001000 2\n7ffff7c00000 4\n0 1\nwindow 1\n555555554000 8\n";
        let sum = symbols.add_up(counted, 1, Device::Igb, false);
        assert_eq!(
            (sum.windows, sum.programs, sum.kernel, sum.driver),
            (2, 13, 17, 11)
        );
        assert_eq!(sum.layers.iter().sum::<u64>(), 2 + 13 + 17 + 11 - 2);
        assert_eq!(sum.layers[layers::PROGRAMS], 13);
        let named = |name: &str| {
            sum.functions
                .iter()
                .find(|(one, _)| one == name)
                .map(|(_, count)| *count)
        };
        assert_eq!(named("igb_poll"), Some(11));
        assert_eq!(named("xsk_sendmsg"), Some(10));
        assert_eq!(named("programs"), Some(13));
        assert_eq!(symbols.add_up(counted, 1, Device::Veth, true).driver, 2);
        assert_eq!(
            symbols.add_up(counted, 2, Device::Igb, true),
            Instructions::default()
        );
    }
}
