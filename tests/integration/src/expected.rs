//! Expected outputs, stored as files and rewritten by `cargo xtask test --bless`.

use std::env;
use std::fs;
use std::path::Path;

/// Asserts that `actual` equals the file `tests/integration/expected/<name>`.
pub fn assert_matches_file(name: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("expected").join(name);
    if env::var_os("CH_BLESS").is_some() {
        fs::write(&path, actual).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let expected = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; `cargo xtask test --bless` writes it", path.display()));
    assert!(
        expected == actual,
        "the output differs from {}; if it is right, store it with `cargo xtask test --bless`:\n{}",
        path.display(),
        difference(&expected, actual)
    );
}

/// `lspci`'s output with the parts masked that differ between boots: BAR addresses and interrupt numbers.
pub fn without_what_varies(text: &str) -> String {
    text.lines().map(|line| replace_number_after(line, &["Memory at ", " IRQ ", "routed to IRQ "]) + "\n").collect()
}

fn replace_number_after(line: &str, marks: &[&str]) -> String {
    for mark in marks {
        if let Some((before, after)) = line.split_once(mark) {
            let rest = after.trim_start_matches(|c: char| c.is_ascii_hexdigit());
            return format!("{before}{mark}…{rest}");
        }
    }
    line.to_owned()
}

/// The lines that differ: `-` for the expected ones, `+` for the actual ones.
fn difference(expected: &str, actual: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), actual.lines().collect());
    let missing = old.iter().filter(|line| !new.contains(line)).map(|line| format!("-{line}\n"));
    let added = new.iter().filter(|line| !old.contains(line)).map(|line| format!("+{line}\n"));
    missing.chain(added).collect()
}
