//! The unit in contrib is as confined as the documents say.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// The most exposure, in tenths of systemd's unit: from 0 to 100. Versions of systemd differ by some tenths.
const MOST: u32 = 20;

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// A figure such as `1.8`, in tenths.
fn tenths(figure: &str) -> u32 {
    figure.replace('.', "").parse().unwrap()
}

#[test]
fn the_exposure_of_the_unit_is_what_the_documents_say() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/systemd/cloud-hypervisor@.service");
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(&unit)
        .output()
        .expect("systemd-analyze is missing: apt-get install systemd");
    let text = String::from_utf8_lossy(&output.stdout);
    let line =
        text.lines().find(|line| line.contains("Overall exposure level")).unwrap_or_else(|| panic!("{output:?}"));
    let measured = tenths(line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).unwrap());
    let usage = read("docs/usage.md");
    let documented = usage.split_once("rates its exposure at ").unwrap().1.split_whitespace().next().unwrap();
    assert!(measured <= MOST && tenths(documented) <= MOST, "{line}; documented: {documented}");
    assert!(measured.abs_diff(tenths(documented)) <= 3, "{line}; documented: {documented}");
}

#[test]
fn the_unit_lets_the_program_confine_itself() {
    let unit = read("contrib/systemd/cloud-hypervisor@.service");
    let filter: Vec<_> = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")).collect();
    for call in ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp"] {
        assert!(
            filter.iter().any(|calls| !calls.starts_with('~') && calls.split(' ').any(|one| one == call)),
            "{call}"
        );
    }
}
