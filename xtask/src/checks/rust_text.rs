//! Rules for the text of Rust files and documents that rustfmt and clippy do not check.

mod words;

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::output;
use crate::progress::{Step, note};

/// The longest line, in characters. It is `max_width` in `rustfmt.toml`, which leaves comments and strings alone.
const LIMIT: usize = 120;
/// The longest name of a function, in characters. Names of tests are claims, and the longest.
const NAME_LIMIT: usize = 60;
/// Words that do not begin a paragraph of a doc comment: it begins with a noun phrase or a verb (CONTRIBUTING.md).
const NOT_FIRST: [&str; 15] = [
    "How", "Its", "One", "That", "Those", "What", "Whatever", "When", "Where", "Whether", "Which", "Who", "Whoever",
    "Whose", "Why",
];

/// A rule: its description, and the numbers of the lines of a file that break it.
type Rule = (String, fn(&str) -> Vec<usize>);

/// Checks each Rust file and document of the checkout by each rule. Returns, for each, true if no line breaks it.
pub(crate) fn check(workspace: &Path) -> Result<Vec<bool>> {
    let files = output(Command::new("git").args(["ls-files", "*.rs", "*.md"]).current_dir(workspace))?;
    let (mut texts, mut documents) = (Vec::new(), Vec::new());
    for file in files.lines() {
        let path = workspace.join(file);
        if path.exists() {
            let list = if file.ends_with(".rs") { &mut texts } else { &mut documents };
            list.push((file, fs::read_to_string(&path).context(path.display())?));
        }
    }
    let rules: [Rule; 3] = [
        (format!("lines of Rust longer than {LIMIT} characters"), long_lines),
        (format!("names of functions longer than {NAME_LIMIT} characters"), long_names),
        ("doc comments that do not begin with a noun phrase or a verb".to_owned(), wrong_first_words),
    ];
    let mut outcomes: Vec<_> = rules.iter().map(|rule| passes(rule, &texts)).collect();
    outcomes.push(has_plain_words(&texts, &documents));
    Ok(outcomes)
}

/// Prints each line that breaks the rule. Returns true if there is none.
fn passes((what, find): &Rule, texts: &[(&str, String)]) -> bool {
    let of_file = |(file, text): &(&str, String)| find(text).into_iter().map(|line| format!("{file}:{line}")).collect();
    report(what, || texts.iter().flat_map(|text| -> Vec<String> { of_file(text) }).collect())
}

/// Prints each refused word of the texts. Returns true if there is none.
fn has_plain_words(texts: &[(&str, String)], documents: &[(&str, String)]) -> bool {
    let of_file = |find: fn(&str) -> Vec<words::Found>, (file, text): &(&str, String)| -> Vec<String> {
        find(text).iter().map(|words::Found(line, advice)| format!("{file}:{line}: {advice}")).collect()
    };
    report("words that are not plain English", || {
        let code = texts.iter().flat_map(|text| of_file(words::in_rust, text));
        code.chain(documents.iter().flat_map(|text| of_file(words::in_document, text))).collect()
    })
}

/// Prints each place that breaks a rule. Returns true if there is none.
fn report(what: &str, find: impl FnOnce() -> Vec<String>) -> bool {
    let step = Step::begin("check", what);
    let found = find();
    found.iter().for_each(|line| note("text", line));
    let failed = if found.is_empty() { "" } else { ": FAILED" };
    step.done_with(format!("{what}: {}{failed}", found.len()));
    found.is_empty()
}

/// The numbers of the lines that are too long.
fn long_lines(text: &str) -> Vec<usize> {
    let long = |(_, line): &(usize, &str)| line.chars().count() > LIMIT;
    text.lines().enumerate().filter(long).map(|(index, _)| index + 1).collect()
}

/// The numbers of the lines that define functions whose names are too long.
fn long_names(text: &str) -> Vec<usize> {
    let name_of = |line: &str| {
        let (_, rest) = line.split_once("fn ")?;
        Some(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').count())
    };
    let long = |(_, line): &(usize, &str)| name_of(line).is_some_and(|len| len > NAME_LIMIT);
    text.lines().enumerate().filter(long).map(|(index, _)| index + 1).collect()
}

/// The numbers of the lines at which a paragraph of a doc comment begins with a word of [`NOT_FIRST`].
fn wrong_first_words(text: &str) -> Vec<usize> {
    let (mut found, mut continues) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let words = doc_text(line);
        let first = words.unwrap_or_default().split_whitespace().next();
        if !continues && first.is_some_and(|word| NOT_FIRST.contains(&word)) {
            found.push(index + 1);
        }
        continues = first.is_some();
    }
    found
}

/// The text of a line of a doc comment; `None` for other lines.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_measured_in_characters_without_its_end() {
        let text = format!("{}\n{}\r\n{}\n", "x".repeat(121), "x".repeat(120), "é".repeat(120));
        assert_eq!(long_lines(&text), [1]);
    }

    #[test]
    fn a_name_ends_before_its_parentheses() {
        let text = format!("fn {}()\n    pub(crate) fn {}<T>(of: T)\n", "x".repeat(60), "x".repeat(61));
        assert_eq!(long_names(&text), [2]);
    }

    #[test]
    fn each_paragraph_of_a_doc_comment_has_a_first_word() {
        let text = "//! What it is.\n/// A name.\n/// What follows a line continues it.\n///\n/// Whether that is so.\n\
                    struct A; // Why\n    /// How\n/// Whatsoever\n";
        assert_eq!(wrong_first_words(text), [1, 5, 7]);
    }
}
