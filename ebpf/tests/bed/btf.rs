//! A reader for the BTF of the committed object: enough to list structures and enumerations
//! (Documentation/bpf/btf.rst in the kernel's tree). The object is ours, so a malformed one panics.

use std::collections::BTreeMap;

/// A structure's size in bytes and its members: name, offset and length in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Structure {
    pub(crate) size: usize,
    pub(crate) members: Vec<(String, usize, usize)>,
}

#[derive(Debug, Default)]
pub(crate) struct Btf {
    pub(crate) structures: BTreeMap<String, Structure>,
    pub(crate) enumerations: BTreeMap<String, Vec<(String, u32)>>,
}

struct Type {
    name: String,
    kind: u32,
    size_or_type: u32,
    /// What follows the common part, in words.
    words: Vec<u32>,
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

fn text(bytes: &[u8], at: usize) -> String {
    let end = bytes[at..].iter().position(|&byte| byte == 0).unwrap();
    String::from_utf8(bytes[at..at + end].to_vec()).unwrap()
}

/// The contents of a section of a 64-bit little-endian ELF object.
pub(crate) fn section<'a>(object: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let (table, entry_len, count) = (u64_at(object, 40), u16_at(object, 58), u16_at(object, 60));
    let header = |index: usize| &object[table + index * entry_len..][..entry_len];
    let contents = |header: &[u8]| -> &'a [u8] { &object[u64_at(header, 24)..][..u64_at(header, 32)] };
    let names = contents(header(u16_at(object, 62)));
    let found = (0..count)
        .map(header)
        .find(|header| text(names, u32_at(header, 0) as usize) == name)?;
    Some(contents(found))
}

impl Btf {
    pub(crate) fn of(object: &[u8]) -> Btf {
        let bytes = section(object, ".BTF").expect("the object has BTF");
        assert_eq!(u16_at(bytes, 0), 0xeb9f);
        let header_len = u32_at(bytes, 4) as usize;
        let part =
            |at: usize| &bytes[header_len + u32_at(bytes, at) as usize..][..u32_at(bytes, at + 4) as usize];
        let types = read_types(part(8), part(16));
        let mut btf = Btf::default();
        for kind in &types {
            match kind.kind {
                4 => {
                    let members = kind.words.chunks(3).map(|member| {
                        let name = text(part(16), member[0] as usize);
                        (name, member[2] as usize / 8, size_of_type(&types, member[1]))
                    });
                    let structure = Structure {
                        size: kind.size_or_type as usize,
                        members: members.collect(),
                    };
                    btf.structures.insert(kind.name.clone(), structure);
                }
                6 => {
                    let values = kind
                        .words
                        .chunks(2)
                        .map(|value| (text(part(16), value[0] as usize), value[1]));
                    btf.enumerations.insert(kind.name.clone(), values.collect());
                }
                _ => {}
            }
        }
        btf
    }
}

fn read_types(mut bytes: &[u8], strings: &[u8]) -> Vec<Type> {
    let void = Type {
        name: String::new(),
        kind: 0,
        size_or_type: 0,
        words: Vec::new(),
    };
    let mut types = vec![void];
    while !bytes.is_empty() {
        let info = u32_at(bytes, 4);
        let (kind, count) = (info >> 24 & 31, (info & 0xffff) as usize);
        let words = match kind {
            1 | 14 | 17 => 1,        // INT, VAR, DECL_TAG
            3 => 3,                  // ARRAY
            4 | 5 | 15 => 3 * count, // STRUCT, UNION, DATASEC
            6 | 13 => 2 * count,     // ENUM, FUNC_PROTO
            2 | 7..=12 | 16 | 18 => 0,
            other => panic!("BTF kind {other}"),
        };
        types.push(Type {
            name: text(strings, u32_at(bytes, 0) as usize),
            kind,
            size_or_type: u32_at(bytes, 8),
            words: (0..words).map(|word| u32_at(bytes, 12 + 4 * word)).collect(),
        });
        bytes = &bytes[12 + 4 * words..];
    }
    types
}

fn size_of_type(types: &[Type], id: u32) -> usize {
    let kind = &types[id as usize];
    match kind.kind {
        1 | 4 | 5 | 6 => kind.size_or_type as usize,
        2 => 8,
        3 => size_of_type(types, kind.words[0]) * kind.words[2] as usize,
        8..=11 => size_of_type(types, kind.size_or_type), // TYPEDEF, VOLATILE, CONST, RESTRICT
        other => panic!("a member of BTF kind {other}"),
    }
}
