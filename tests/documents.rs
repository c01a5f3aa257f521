//! What the documents name exists: links, headings, source files, tests and fuzz targets. README stays on one page.
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

/// The threat model names what shows that each limit holds.
#[test]
fn every_test_and_fuzz_target_of_the_threat_model_exists() {
    let (files, text) = (files(), fs::read_to_string(root().join("SECURITY.md")).unwrap());
    let sources: String = with_extension(&files, "rs").map(|(_, text)| text).collect();
    let quoted: Vec<_> = text.split('`').skip(1).step_by(2).collect();
    let tests = quoted.iter().filter(|name| name.matches('_').count() > 2 && !name.contains(['/', ' ', '.']));
    let missing: Vec<_> = tests.clone().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "there are no such tests: {missing:?}");
    assert!(tests.count() > 20, "the threat model cites tests");
    let targets = text.split("fuzz `").skip(1).filter_map(|rest| Some(rest.split_once('`')?.0));
    for target in targets {
        let path = Path::new("fuzz/fuzz_targets").join(target).with_extension("rs");
        assert!(files.contains(&path), "{target}: there is no such fuzz target");
    }
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
