//! docs/conformance.md lists each check with the number of tests that cite it. Each has a test or a reason for none.
//!
//! A test cites its checks in a line of its own: `///` or `//`, the numbers, a colon, a few words. A check without a
//! test needs a reason in docs/sriov.md. `CH_BLESS=1 cargo test --test conformance` rewrites the counts.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Requirements of the standards and of Linux.
const CHECKS: RangeInclusive<u8> = 1..=64;
/// Mistakes of other implementations.
const PITFALLS: RangeInclusive<u8> = 1..=24;
/// Rules of the datasheet of an emulated NIC.
const DATASHEET: RangeInclusive<u8> = 1..=30;
/// Folders with tests.
const FOLDERS: [&str; 7] = ["machine", "pci", "src", "tests", "virtio-devices", "vmm", "x550"];
/// The document with the tables of counts.
const COUNTED: &str = "docs/conformance.md";
/// The section that says why some checks have no test.
const EXCUSED: (&str, &str) = ("docs/sriov.md", "## Checks without a test");

/// `G`, `B` or `X`, and a number.
type Number = (char, u8);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn all() -> Vec<Number> {
    let parts = [('G', CHECKS), ('B', PITFALLS), ('X', DATASHEET)];
    parts.into_iter().flat_map(|(letter, numbers)| numbers.map(move |n| (letter, n))).collect()
}

fn number(text: &str) -> Option<Number> {
    let letter = text.chars().next().filter(|letter| matches!(letter, 'G' | 'B' | 'X'))?;
    let digits = &text[1..];
    let plain = digits.len() <= 2 && digits.bytes().all(|digit| digit.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten().map(|n| (letter, n))
}

fn numbers(list: &str) -> Option<Vec<Number>> {
    list.split(", ").map(number).collect()
}

/// The numbers that a line cites, if it is a citation.
fn citation(line: &str) -> Option<Vec<Number>> {
    let text = line.trim_start();
    let text = text.strip_prefix("/// ").or_else(|| text.strip_prefix("// "))?;
    numbers(text.split_once(':')?.0)
}

/// All Rust files under `folder`, except build output.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// The tests of a source and what they cite. The error names a citation that no test follows.
fn tests_of(text: &str) -> Result<Vec<(String, Vec<Number>)>, String> {
    let lines: Vec<_> = text.lines().collect();
    let cited = lines.iter().enumerate().filter_map(|(n, line)| Some((n, citation(line)?)));
    cited
        .map(|(n, numbers)| {
            let item: Vec<_> =
                lines[n + 1..].iter().map(|line| line.trim_start()).take_while(|l| !l.is_empty()).collect();
            let name = item.iter().find_map(|line| line.strip_prefix("fn ")?.split('(').next());
            let is_test = item.iter().any(|line| matches!(*line, "#[test]" | "#[rstest]"));
            match name {
                Some(name) if is_test => Ok((name.to_string(), numbers)),
                _ => Err(format!("line {}: a citation belongs to the test that follows it", n + 1)),
            }
        })
        .collect()
}

/// Number of tests that cite each number.
fn counts() -> BTreeMap<Number, usize> {
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|folder| sources(&root().join(folder), &mut files));
    let mut counts: BTreeMap<_, _> = all().into_iter().map(|number| (number, 0)).collect();
    for file in files.iter().filter(|file| !file.ends_with(file!())) {
        let tests = tests_of(&fs::read_to_string(file).unwrap());
        let tests = tests.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        for (name, number) in tests.iter().flat_map(|(name, numbers)| numbers.iter().map(move |number| (name, number)))
        {
            let count = counts.get_mut(number);
            *count.unwrap_or_else(|| panic!("{}: {name} cites {number:?}, which is no check", file.display())) += 1;
        }
    }
    counts
}

/// The lines of a section of a document, and where they begin.
fn section((document, heading): (&str, &str)) -> (String, RangeInclusive<usize>) {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let begin = text.lines().position(|line| line == heading);
    let begin = begin.unwrap_or_else(|| panic!("{document} has no section {heading:?}"));
    let len = text.lines().skip(begin + 1).take_while(|line| !line.starts_with("## ")).count();
    (text, begin..=begin + len)
}

/// A row of a table whose first cell holds numbers: these, and the other cells.
fn row(line: &str) -> Option<(Vec<Number>, Vec<&str>)> {
    let mut cells = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim);
    Some((numbers(cells.next()?)?, cells.collect()))
}

/// The checks that have no test and a reason for it.
fn excused() -> Vec<Number> {
    let (text, lines) = section(EXCUSED);
    let rows = text.lines().skip(*lines.start()).take(lines.count()).filter_map(row);
    rows.inspect(|(numbers, why)| assert!(why.iter().all(|why| why.len() > 20), "{numbers:?} needs a reason"))
        .flat_map(|(numbers, _)| numbers)
        .collect()
}

/// The document as it is, the document with the current counts, and the numbers of its rows.
fn with_counts(counts: &BTreeMap<Number, usize>) -> (String, String, Vec<Number>) {
    let text = fs::read_to_string(root().join(COUNTED)).unwrap();
    let mut listed = Vec::new();
    let mut rewritten = String::new();
    for line in text.lines() {
        match row(line) {
            Some((number, cells)) => {
                let [number] = number[..] else { panic!("one check a row: {line}") };
                listed.push(number);
                let count = counts.get(&number).copied().unwrap_or(0);
                rewritten += &format!("| {}{} | {} | {count} |\n", number.0, number.1, cells[0]);
            }
            None => rewritten += &format!("{line}\n"),
        }
    }
    (text, rewritten, listed)
}

#[test]
fn the_table_counts_the_tests_that_there_are() {
    let (text, rewritten, listed) = with_counts(&counts());
    assert_eq!(listed, all(), "{COUNTED} lists each check once and in order");
    if std::env::var_os("CH_BLESS").is_some() {
        fs::write(root().join(COUNTED), &rewritten).unwrap();
        return;
    }
    let changed: Vec<_> =
        text.lines().zip(rewritten.lines()).filter(|(old, new)| old != new).map(|(_, new)| new).collect();
    assert!(
        changed.is_empty(),
        "`CH_BLESS=1 cargo test --test conformance` rewrites these rows:\n{}",
        changed.join("\n")
    );
}

#[test]
fn every_check_has_a_test_or_a_reason_for_none() {
    let (counts, excused) = (counts(), excused());
    let wrong: Vec<_> = counts.iter().filter(|(number, count)| (**count == 0) != excused.contains(number)).collect();
    assert!(wrong.is_empty(), "without a test and a reason in {}, or with both: {wrong:?}", EXCUSED.0);
    assert!(excused.iter().all(|number| counts.contains_key(number)), "{excused:?}");
}

#[test]
fn a_citation_is_numbers_and_a_colon_above_a_test() {
    assert_eq!(citation("    /// G5, B2: locked."), Some(vec![('G', 5), ('B', 2)]));
    assert_eq!(citation("// B12: no pin."), Some(vec![('B', 12)]));
    for other in [
        "/// GSI 5: a line",
        "/// X550: a NIC",
        "// G5 and B2: x",
        "//G5: x",
        "/// G100: x",
        "/// G: x",
        "let g = 5; // G5: x",
        "",
    ] {
        assert_eq!(citation(other), None, "{other}");
    }
    let test = "/// G1: a.\n#[rstest]\n#[case::b(1)]\nfn c(#[case] d: u8) {\n}\n";
    assert_eq!(tests_of(test), Ok(vec![("c".to_string(), vec![('G', 1)])]));
    for lost in ["/// G1: a.\n\n#[test]\nfn b() {}\n", "/// G1: a.\nfn b() {}\n", "/// G1: a.\n#[test]\n"] {
        assert!(tests_of(lost).is_err(), "{lost}");
    }
}
