//! Mutants of a source file: where they are, and the text with numbered ones in it, each behind a switch.
//!
//! The text is changed by byte ranges: what no mutant touches stays as it is. What a macro gets is no expression here, so assertions and
//! log lines have no mutants.

use std::ops::Range;

use anyhow::{Context, Result};
use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Expr, ImplItem, Item, ItemImpl, Pat, Signature, Stmt};

/// What stands in the place of operators and methods: behind each name, those that take its place.
const OTHERS: &str = "< <= >=, <= < >, > >= <=, >= > <, == !=, != ==, + -, - +, += -=, -= +=, && ||, || &&, \
    wrapping_add wrapping_sub, wrapping_sub wrapping_add, saturating_add saturating_sub, saturating_sub saturating_add";

/// A place in a source file, and what would stand there.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) file: String,
    /// File, line, column, and what becomes of it: unlike any other site's.
    pub(super) name: String,
    at: Range<usize>,
    /// What is added around it, with `ON` where the switch is asked.
    before: String,
    after: &'static str,
}

/// All mutants of a source file.
pub(super) fn sites(file: &str, source: &str) -> Result<Vec<Site>> {
    let tree = syn::parse_file(source).with_context(|| format!("{file} is no Rust"))?;
    let sites = Vec::new();
    let mut finder = Finder { file, source, sites };
    finder.visit_file(&tree);
    Ok(finder.sites)
}

/// The source with mutants in it, by number.
pub(super) fn rewritten(source: &str, chosen: &[(usize, &Site)]) -> String {
    let mut parts = Vec::new();
    for (number, site) in chosen {
        let (start, end, order) = (site.at.start as isize, site.at.end as isize, *number as isize);
        let before = site.before.replace("ON", &format!("crate::mutated({number})"));
        // What ends at a place comes before what begins there; of two around each other, the outer one begins first and ends last.
        parts.push(((start, 1, -end, order), before));
        parts.push(((end, 0, -start, -order), site.after.to_owned()));
    }
    parts.sort();
    let (mut text, mut copied) = (String::new(), 0);
    for ((at, ..), part) in parts {
        text += &source[copied..at as usize];
        text += &part;
        copied = at as usize;
    }
    text + &source[copied..]
}

struct Finder<'a> {
    file: &'a str,
    source: &'a str,
    sites: Vec<Site>,
}

impl Finder<'_> {
    fn text(&self, part: &impl Spanned) -> &str {
        &self.source[part.span().byte_range()]
    }

    fn add(&mut self, at: Range<usize>, shown: Span, what: &str, before: String, after: &'static str) {
        let start = shown.start();
        self.sites.push(Site {
            file: self.file.to_owned(),
            name: format!("{}:{}:{} {what}", self.file, start.line, start.column + 1),
            at,
            before,
            after,
        });
    }

    /// Another expression in the place of one.
    fn replaced(&mut self, old: &impl Spanned, shown: Span, what: &str, new: &str) {
        let before = format!("(if ON {{ {new} }} else {{ ");
        self.add(old.span().byte_range(), shown, what, before, " })");
    }

    /// Another operator, or method, between what is left and right of it.
    fn operator(&mut self, all: &impl Spanned, operator: Span) {
        let (all_at, at) = (all.span().byte_range(), operator.byte_range());
        let name = &self.source[at.clone()];
        let others = OTHERS
            .split(", ")
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        for other in others.unwrap_or_default().split_whitespace() {
            let [left, right] = [all_at.start..at.start, at.end..all_at.end].map(|side| &self.source[side]);
            let new = format!("{left}{other}{right}");
            self.replaced(all, operator, &format!("{name} becomes {other}"), &new);
        }
    }

    /// A number, one more and one less.
    fn number(&mut self, old: &Expr, changes: &[&str]) {
        for change in changes {
            let what = format!("{} {change}", self.text(old));
            self.replaced(old, old.span(), &what, &format!("({what})"));
        }
    }

    /// Whatever is computed at compile time can ask no switch.
    fn function(&mut self, attributes: &[Attribute], signature: &Signature, block: &Block) {
        if signature.constness.is_some() || self.is_for_tests(attributes) {
            return;
        }
        let values: &[&str] = match self.text(&signature.output) {
            "-> bool" => &["false", "true"],
            result if result.starts_with("-> Result<") => &["Ok(Default::default())"],
            _ => &["Default::default()"],
        };
        let brace = block.brace_token.span.open();
        let end = brace.byte_range().end;
        for value in values {
            let what = format!("{}() returns {value}", signature.ident);
            self.add(
                end..end,
                brace,
                &what,
                format!(" if ON {{ return {value}; }}"),
                "",
            );
        }
        self.visit_block(block);
    }

    fn is_for_tests(&self, attributes: &[Attribute]) -> bool {
        let is_it = |one: &Attribute| one.path().is_ident("cfg") && self.text(one).contains("test");
        attributes.iter().any(is_it)
    }
}

impl Visit<'_> for Finder<'_> {
    fn visit_item(&mut self, item: &Item) {
        match item {
            Item::Fn(item) => self.function(&item.attrs, &item.sig, &item.block),
            Item::Mod(item) if !self.is_for_tests(&item.attrs) => visit::visit_item_mod(self, item),
            Item::Impl(item) if !self.is_for_tests(&item.attrs) && !is_shown(item) => {
                visit::visit_item_impl(self, item);
            }
            _ => {}
        }
    }

    fn visit_impl_item(&mut self, item: &ImplItem) {
        if let ImplItem::Fn(item) = item {
            self.function(&item.attrs, &item.sig, &item.block);
        }
    }

    // Lengths of arrays, and patterns: see `function`.
    fn visit_type(&mut self, _: &syn::Type) {}
    fn visit_path_arguments(&mut self, _: &syn::PathArguments) {}

    fn visit_pat(&mut self, pattern: &Pat) {
        if let Pat::Guard(guarded) = pattern {
            let guard = &guarded.guard;
            if !self.text(guard).contains("let ") {
                let negated = format!("!({})", self.text(guard));
                self.replaced(guard, guard.span(), "guard negated", &negated);
            }
            self.visit_expr(guard);
        }
    }

    fn visit_stmt(&mut self, statement: &Stmt) {
        if let Stmt::Expr(Expr::MethodCall(call), Some(_)) = statement {
            let (at, what) = (statement.span().byte_range(), format!("no .{}()", call.method));
            self.add(at, call.method.span(), &what, "if !ON { ".to_owned(), " }");
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_expr(&mut self, expression: &Expr) {
        match expression {
            Expr::Const(_) => return,
            Expr::Repeat(repeat) => return self.visit_expr(&repeat.expr),
            // More room or less, and nothing else.
            Expr::Call(call) if self.text(&call.func).ends_with("with_capacity") => return,
            // Where something is bound, `&&` is no operator.
            Expr::Binary(binary) if self.text(&binary.op) == "&&" && self.text(binary).contains("let ") => {}
            Expr::Binary(binary) => self.operator(binary, binary.op.span()),
            Expr::MethodCall(call) => self.operator(call, call.method.span()),
            Expr::Lit(literal) => match &literal.lit {
                syn::Lit::Int(number) if number.base10_digits() == "0" => self.number(expression, &["+ 1"]),
                syn::Lit::Int(_) => self.number(expression, &["+ 1", "- 1"]),
                _ => {}
            },
            Expr::Path(path) => {
                let name = path.path.segments.last().map(|last| last.ident.to_string());
                if name.is_some_and(|name| name.len() > 1 && !name.contains(char::is_lowercase)) {
                    self.number(expression, &["+ 1", "- 1"]);
                }
            }
            _ => {}
        }
        visit::visit_expr(self, expression);
    }
}

/// For people's eyes alone.
fn is_shown(item: &ItemImpl) -> bool {
    let of = item.trait_.as_ref().and_then(|(path, _)| path.segments.last());
    of.is_some_and(|of| of.ident == "Debug" || of.ident == "Display")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::bed::leftovers::temporary_folder;
    use crate::mutants::SWITCH;

    /// Each line but the last has its own kind of mutants, and nothing else has any.
    const SOURCE: &str = "
fn less(a: u32, b: u32) -> bool { a < b }
fn sum(mut a: u32) -> u32 { a += LOW; a.wrapping_sub(2) - 1 }
fn both(a: Option<u32>, b: bool) -> bool { if let Some(a) = a && a > 3 && b { return true; } !b || a.is_none() }
fn class(a: u32) -> char { match a { a if a == 5 => 'x', 3 => 'y', _ => 'z' } }
fn list() -> Vec<[u8; 2]> { let mut list = Vec::with_capacity(7); list.push([0; 2]); assert!(3 > 2); list }
const LOW: u32 = 1 + 2;
const fn fixed() -> u32 { 4 }
#[cfg(test)] mod tests { fn none() -> u32 { 1 } }
impl std::fmt::Debug for X { fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { Ok(()) } }
struct X;
fn main() { println!(\"{} {} {} {} {:?}\", less(3, 3), sum(4), both(Some(3), true), class(5), list()); }
";

    /// All mutants, and what the program says with each of them on.
    const SAID: &str = "\
2:33 less() returns false | false 4 false x [[0, 0]]
2:33 less() returns true | true 4 false x [[0, 0]]
2:37 < becomes <= | true 4 false x [[0, 0]]
2:37 < becomes >= | true 4 false x [[0, 0]]
3:27 sum() returns Default::default() | false 0 false x [[0, 0]]
3:31 += becomes -= | false 4294967294 false x [[0, 0]]
3:34 LOW + 1 | false 5 false x [[0, 0]]
3:34 LOW - 1 | false 3 false x [[0, 0]]
3:57 - becomes + | false 6 false x [[0, 0]]
3:41 wrapping_sub becomes wrapping_add | false 8 false x [[0, 0]]
3:54 2 + 1 | false 3 false x [[0, 0]]
3:54 2 - 1 | false 5 false x [[0, 0]]
3:59 1 + 1 | false 3 false x [[0, 0]]
3:59 1 - 1 | false 5 false x [[0, 0]]
4:42 both() returns false | false 4 false x [[0, 0]]
4:42 both() returns true | false 4 true x [[0, 0]]
4:68 > becomes >= | false 4 true x [[0, 0]]
4:68 > becomes <= | false 4 true x [[0, 0]]
4:70 3 + 1 | false 4 false x [[0, 0]]
4:70 3 - 1 | false 4 true x [[0, 0]]
4:97 || becomes && | false 4 false x [[0, 0]]
5:26 class() returns Default::default() | false 4 false \0 [[0, 0]]
5:43 guard negated | false 4 false z [[0, 0]]
5:45 == becomes != | false 4 false z [[0, 0]]
5:48 5 + 1 | false 4 false z [[0, 0]]
5:48 5 - 1 | false 4 false z [[0, 0]]
6:27 list() returns Default::default() | false 4 false x []
6:72 no .push() | false 4 false x []
6:78 0 + 1 | false 4 false x [[1, 1]]
12:11 main() returns Default::default() | 
";

    #[test]
    fn each_mutant_is_what_its_name_says_and_the_others_are_off() {
        let sites = sites("x.rs", SOURCE).unwrap();
        let chosen: Vec<_> = (1..).zip(&sites).collect();
        let (folder, _registered) = temporary_folder(&std::env::temp_dir(), "mutants").unwrap();
        let source = folder.join("x.rs");
        std::fs::write(&source, rewritten(SOURCE, &chosen) + SWITCH).unwrap();
        let mut rustc = Command::new("rustc");
        rustc
            .current_dir(&folder)
            .args(["--edition", "2024", "-Awarnings"])
            .arg(&source);
        assert!(rustc.status().unwrap().success());
        let said = |number: usize| {
            let mut program = Command::new(folder.join("x"));
            let output = program.env("LM_MUTANT", number.to_string()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
        };
        assert_eq!(said(0), "false 4 false x [[0, 0]]");
        let all = chosen
            .iter()
            .map(|(number, site)| format!("{} | {}\n", &site.name["x.rs:".len()..], said(*number)));
        assert_eq!(all.collect::<String>(), SAID);
    }
}
