//! Lines of code that are too long. rustfmt does not wrap comments and strings, so these need a check.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::apt::output;
use crate::error::{Context, Result};
use crate::progress::{Step, note};

/// The longest line, in characters. It is `max_width` in `rustfmt.toml`.
const LIMIT: usize = 120;

/// Checks each Rust file of the checkout. Returns true if the check passed.
pub(crate) fn check(workspace: &Path) -> Result<bool> {
    let what = format!("lines of Rust longer than {LIMIT} characters");
    let step = Step::begin("check", &what);
    let files = output(Command::new("git").args(["ls-files", "*.rs"]).current_dir(workspace))?;
    let mut found = Vec::new();
    for file in files.lines() {
        let path = workspace.join(file);
        if path.exists() {
            let text = fs::read_to_string(&path).context(path.display())?;
            found.extend(long_lines(&text).map(|line| format!("{file}:{line}")));
        }
    }
    let passed = found.is_empty();
    if !passed {
        found.iter().for_each(|line| note("long", line));
    }
    let failed = if passed { "" } else { ": FAILED" };
    step.done_with(format!("{what}: {}{failed}", found.len()));
    Ok(passed)
}

/// The numbers of the lines that are too long.
fn long_lines(text: &str) -> impl Iterator<Item = usize> {
    let long = |(_, line): &(usize, &str)| line.chars().count() > LIMIT;
    text.lines().enumerate().filter(long).map(|(index, _)| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_measured_in_characters_without_its_end() {
        let text = format!("{}\n{}\r\n{}\n", "x".repeat(121), "x".repeat(120), "é".repeat(120));
        assert_eq!(long_lines(&text).collect::<Vec<_>>(), [1]);
    }
}
