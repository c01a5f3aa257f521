//! Names in the documents exist: links, headings, source files, tests and fuzz targets. Claims of the threat model name
//! their tests. README stays on one page.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The longest that README.md may be.
const README_LINES: usize = 100;
/// Folders without documents or sources of ours.
const SKIPPED: [&str; 3] = ["target", "corpus", "artifacts"];
/// The files that a measurement found, whatever became of them since.
const MEASURED: &str = "docs/coverage.md";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files of the checkout, relative to its root, except build output and what fuzzing leaves.
fn files() -> BTreeSet<PathBuf> {
    let (mut files, mut folders) = (BTreeSet::new(), vec![root().to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name == ".git" || SKIPPED.contains(&name) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.strip_prefix(root()).unwrap().to_path_buf());
            }
        }
    }
    files
}

fn with_extension<'a>(files: &'a BTreeSet<PathBuf>, extension: &'a str) -> impl Iterator<Item = (&'a Path, String)> {
    let of_kind = files.iter().filter(move |path| path.extension().is_some_and(|of_path| of_path == extension));
    of_kind.map(|path| (path.as_path(), fs::read_to_string(root().join(path)).unwrap()))
}

/// The paths in `text` that end in `suffix`: `pci/src/bar.rs`, or `bar.rs` alone.
fn paths<'a>(text: &'a str, suffix: &'a str) -> impl Iterator<Item = &'a str> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let words = text.split(move |c: char| !is_path(c)).map(|word| word.trim_end_matches('.'));
    words.filter(move |word| word.ends_with(suffix) && word.len() > suffix.len())
}

/// The targets of `[text](target)` in `text` that are no address of the web.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    targets.filter(|target| !target.contains("://"))
}

/// A heading as the part of a link behind `#`.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn headings(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches('#').trim()))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_of_it() {
    for (document, text) in with_extension(&files(), "md") {
        for link in links(&text) {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let here = root().join(document);
            let target = if path.is_empty() { here } else { here.parent().unwrap().join(path) };
            assert!(target.exists(), "{}: {link}: there is no such file", document.display());
            let has_heading = || headings(&fs::read_to_string(&target).unwrap()).any(|anchor| anchor == heading);
            assert!(heading.is_empty() || has_heading(), "{}: {link}: there is no such heading", document.display());
        }
    }
}

#[test]
fn every_source_file_that_a_document_names_exists() {
    let files = files();
    for (document, text) in with_extension(&files, "md").filter(|(document, _)| *document != Path::new(MEASURED)) {
        for path in paths(&text, ".rs") {
            let exists = files.iter().any(|file| file.ends_with(path));
            assert!(exists, "{}: {path}: there is no such file", document.display());
        }
    }
}

#[test]
fn every_document_that_a_source_file_names_exists() {
    let files = files();
    for (source, text) in with_extension(&files, "rs").filter(|(source, _)| *source != Path::new(file!())) {
        for path in paths(&text, ".md").filter(|path| path.starts_with("docs/")) {
            assert!(files.contains(Path::new(path)), "{}: {path}: there is no such file", source.display());
        }
    }
}

/// Sections of the threat model without claims about limits.
const NO_LIMITS: [&str; 3] = ["Security", "Reporting a vulnerability", "Who is trusted"];

/// Names of tests in a text, as code: `like_this_one`. A fuzz target is `fuzz` and a name.
fn shown_by(text: &str) -> Vec<String> {
    let mut shown = Vec::new();
    let mut before = "";
    for (number, part) in text.split('`').enumerate() {
        let is_name = part.matches('_').count() > 1 && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if number % 2 == 0 {
            before = part;
        } else if before.ends_with("fuzz ") {
            shown.push(format!("fuzz {part}"));
        } else if is_name {
            shown.push(part.to_string());
        }
    }
    shown
}

/// The claims of the threat model, each with the tests and fuzz targets that it names. A claim is a row of a table or a
/// bullet in a section about limits. The text right above a table may name the tests of all its rows.
fn claims(text: &str) -> Vec<(String, Vec<String>)> {
    let mut claims = Vec::<(String, Vec<String>)>::new();
    let (mut section, mut above, mut rows, mut is_new) = ("", String::new(), 0, false);
    for line in text.lines() {
        rows = if line.starts_with('|') { rows + 1 } else { 0 };
        let has_limits = !NO_LIMITS.contains(&section);
        match line.chars().next() {
            Some('#') => (section, above) = (line.trim_start_matches('#').trim(), String::new()),
            // The first two are the heads of columns and the line below.
            Some('|') if rows > 2 && has_limits => claims.push((line.to_string(), shown_by(&format!("{line}{above}")))),
            Some('|') => {}
            Some('-') if has_limits => claims.push((line.to_string(), shown_by(line))),
            Some(' ') if has_limits => claims.last_mut().unwrap().1.extend(shown_by(line)),
            None => {}
            Some(_) if is_new => above = line.to_string(),
            Some(_) => above.push_str(line),
        }
        is_new = line.is_empty();
    }
    claims
}

/// The threat model names what shows that each limit holds.
#[test]
fn every_claim_of_the_threat_model_names_a_test_that_exists() {
    let (files, text) = (files(), fs::read_to_string(root().join("SECURITY.md")).unwrap());
    let sources: Vec<_> = with_extension(&files, "rs").map(|(_, text)| text).collect();
    let exists = |name: &String| match name.strip_prefix("fuzz ") {
        Some(target) => files.contains(&Path::new("fuzz/fuzz_targets").join(target).with_extension("rs")),
        None => sources.iter().any(|source| is_test(source, name)),
    };
    let claims = claims(&text);
    let bare: Vec<_> = claims.iter().filter(|(_, shown)| shown.is_empty()).map(|(claim, _)| claim).collect();
    println!("{} claims, {} without a test", claims.len(), bare.len());
    assert!(bare.is_empty(), "{} claims name no test: {bare:#?}", bare.len());
    assert!(claims.len() > 60, "{}", claims.len());
    // In all of the text: also where it claims nothing.
    let named: BTreeSet<_> = shown_by(&text).into_iter().collect();
    let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "there are no such tests: {missing:#?}");
}

/// True if a source file has a test of this name.
fn is_test(source: &str, name: &str) -> bool {
    let Some((before, _)) = source.split_once(&format!("fn {name}(")) else { return false };
    // Its attributes are between it and what is before it.
    let attributes = before.rsplit(['}', ';', '{']).next().unwrap();
    attributes.contains("#[test]") || attributes.contains("#[rstest]")
}

#[test]
fn claims_are_rows_and_limit_bullets_with_tests_in_or_above() {
    let text = "# Security\n- x\n## Who is trusted\n| a | b |\n|---|---|\n| guest | no |\n## Limits\nText.\n\n\
                | a | b |\n|---|---|\n| x `y` | `a_b_c_d`, fuzz `z` |\n| y | `no.rs_a_b_c` |\n\n\
                - one `a_b`\n  and `e_f_g_h`\n- two\n\n### All\nNot by `m_n_o_p`.\n\nShown\nby `i_j_k_l`.\n\n\
                | a |\n|---|\n| p |\n";
    let found = claims(text);
    let shown: Vec<Vec<&str>> = found.iter().map(|(_, shown)| shown.iter().map(String::as_str).collect()).collect();
    assert_eq!(shown, [vec!["a_b_c_d", "fuzz z"], vec![], vec!["e_f_g_h"], vec![], vec!["i_j_k_l"]]);
    assert!(is_test("}\n#[test]\n#[ignore]\nfn a_b() {", "a_b") && !is_test("#[test]\nfn c() {}\nfn a_b() {", "a_b"));
}

#[test]
fn the_readme_is_one_page() {
    let lines = fs::read_to_string(root().join("README.md")).unwrap().lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines, more than {README_LINES}");
}

#[test]
fn links_paths_and_headings_are_found() {
    assert_eq!(links("a [b](c.md#d) [e](https://f) [g](#h)").collect::<Vec<_>>(), ["c.md#d", "#h"]);
    let named: Vec<_> = paths("`a/b.rs`, (c.rs). d.rss .rs e-f/g_h.rs.", ".rs").collect();
    assert_eq!(named, ["a/b.rs", "c.rs", "e-f/g_h.rs"]);
    assert_eq!(
        headings("# What `works`, now\ntext\n### B2 or not").collect::<Vec<_>>(),
        ["what-works-now", "b2-or-not"]
    );
}
