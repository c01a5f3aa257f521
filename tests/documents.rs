//! Names in the documents exist: links, headings, source files, tests and fuzz targets. Claims of the threat model name
//! their tests. Commands of a guide are run, or name the test that runs them. README stays on one page.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The longest that README.md may be.
const README_LINES: usize = 100;
/// Folders without documents or sources of ours.
const SKIPPED: [&str; 3] = ["target", "corpus", "artifacts"];
/// The guides, whose blocks of commands are run by tests.
const GUIDES: &str = "docs/guide";
/// The longest that a guide, and the overview of the code, may be.
const GUIDE_LINES: usize = 150;
const OVERVIEW: (&str, usize) = ("docs/architecture.md", 250);
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

/// A package carries its license, so a crate that is a package of its own has a copy.
#[test]
fn the_license_of_pci_sriov_is_that_of_the_project() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    assert_eq!(read("pci/LICENSE"), read("LICENSE"));
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
        Some(target) => {
            let file = PathBuf::from(target).with_extension("rs");
            files.iter().any(|path| path.starts_with("fuzz/fuzz_targets") && path.ends_with(&file))
        }
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

/// Evidence for a block of commands.
#[derive(Debug, PartialEq, Eq)]
enum Evidence<'a> {
    /// `tests/api/guides.rs` runs it.
    Run,
    /// A test with this name does the same.
    Test(&'a str),
    /// Each line of it is in this file.
    From(&'a str),
    /// The text above says that it is not tested.
    Untested,
    /// None.
    Missing,
}

/// The blocks of a guide, each with its evidence: `sh` behind the fence, or a comment above it.
fn guide_blocks(text: &str) -> Vec<(Evidence<'_>, Vec<&str>)> {
    let mut blocks = Vec::new();
    let (mut lines, mut above, mut paragraph) = (text.lines(), "", "");
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else {
            if !line.is_empty() && !line.starts_with("<!--") {
                paragraph = line;
            }
            above = line;
            continue;
        };
        let mark = above.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")).unwrap_or_default();
        let evidence = match (kind, mark.split_once(": ")) {
            ("sh", _) => Evidence::Run,
            (_, Some(("test", name))) => Evidence::Test(name),
            (_, Some(("from", path))) => Evidence::From(path),
            _ if mark == "not tested" && paragraph.to_lowercase().contains("not tested") => Evidence::Untested,
            _ => Evidence::Missing,
        };
        blocks.push((evidence, lines.by_ref().take_while(|line| *line != "```").collect()));
    }
    blocks
}

/// The test that a row of a table names in a comment of its last cell.
fn test_of_row(row: &str) -> Option<&str> {
    row.strip_suffix(" --> |")?.rsplit_once("<!-- test: ").map(|(_, name)| name)
}

#[test]
fn every_cause_of_no_traffic_names_a_test_that_shows_it() {
    let (files, text) = (files(), fs::read_to_string(root().join(GUIDES).join("no-traffic.md")).unwrap());
    let sources: Vec<_> = with_extension(&files, "rs").map(|(_, text)| text).collect();
    let lines: Vec<_> = text.lines().collect();
    // A row that is neither the head of the columns nor the line below.
    let is_row = |pair: &&[&str]| pair[0].starts_with('|') && pair[1].starts_with("| ");
    let rows: Vec<_> = lines.windows(2).filter(is_row).map(|pair| pair[1]).collect();
    assert!(rows.len() > 25, "{}", rows.len());
    for row in rows {
        let shown = test_of_row(row).is_some_and(|name| sources.iter().any(|source| is_test(source, name)));
        assert!(shown, "no test: {row}");
    }
}

#[test]
fn every_row_of_the_cni_specification_names_a_test() {
    let (files, text) = (files(), fs::read_to_string(root().join("docs/reference/cni.md")).unwrap());
    let sources: Vec<_> = with_extension(&files, "rs").map(|(_, text)| text).collect();
    let table = text.split_once("## The specification, row by row").unwrap().1;
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.rsplit_once(" | "));
    let rows: Vec<_> = cells.filter(|(_, last)| *last != "test").collect();
    assert!(rows.len() > 30, "{}", rows.len());
    for (row, last) in rows {
        let name = last.trim_matches('`');
        assert!(sources.iter().any(|source| is_test(source, name)), "no test: {row}: {last}");
    }
}

#[test]
fn each_block_of_a_guide_is_run_or_names_what_shows_it() {
    let files = files();
    let sources: Vec<_> = with_extension(&files, "rs").map(|(_, text)| text).collect();
    let guides: Vec<_> = with_extension(&files, "md").filter(|(path, _)| path.starts_with(GUIDES)).collect();
    assert!(guides.len() > 4, "{guides:?}");
    for (guide, text) in &guides {
        for (evidence, block) in guide_blocks(text) {
            let shown = match &evidence {
                Evidence::Run | Evidence::Untested => true,
                Evidence::Test(name) => sources.iter().any(|source| is_test(source, name)),
                Evidence::From(path) => {
                    let source = fs::read_to_string(root().join(path)).unwrap();
                    block.iter().all(|line| source.contains(line))
                }
                Evidence::Missing => false,
            };
            assert!(shown, "{}: {evidence:?}: {block:#?}", guide.display());
        }
        // Tests that a guide names in its text.
        for name in shown_by(text).iter().filter(|name| name.matches('_').count() > 3) {
            assert!(sources.iter().any(|source| is_test(source, name)), "{}: no test {name}", guide.display());
        }
    }
}

#[test]
fn the_evidence_for_a_block_is_above_it() {
    use Evidence::{From, Missing, Run, Test, Untested};
    let text = "a\n\n```sh\nx\n```\nText, not tested:\n\n<!-- not tested -->\n```json\n{}\n```\n\n<!-- test: a_b -->\n\
                ```\ny\nz\n```\n<!-- from: c.rs -->\n```\n```\nb\n<!-- not tested -->\n```\n```\n```\nu\n```\n";
    let found: Vec<_> = guide_blocks(text).into_iter().map(|(evidence, block)| (evidence, block.len())).collect();
    assert_eq!(found, [(Run, 1), (Untested, 1), (Test("a_b"), 2), (From("c.rs"), 0), (Missing, 0), (Missing, 1)]);
}

/// The longest line of a document's prose.
const COLUMNS: usize = 100;

/// The lines of prose that are too long. Tables, code, comments and a word on its own, such as a link, may be longer.
fn long_prose(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let may_be_longer = |line: &str| line.starts_with(['|', '<']) || !line.contains(' ');
    let lines = text.lines().filter(|line| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code && line.chars().count() > COLUMNS && !may_be_longer(line.trim_start())
    });
    lines.collect()
}

#[test]
fn prose_for_readers_wraps_at_100_columns() {
    for (document, text) in with_extension(&files(), "md") {
        let long = long_prose(&text);
        assert!(long.is_empty(), "{}: longer than {COLUMNS} columns: {long:#?}", document.display());
    }
}

#[test]
fn tables_code_and_single_words_may_be_longer_than_prose() {
    let [long, word] = [format!("{}b", "a ".repeat(50)), "a".repeat(101)];
    let text = format!("{long}\n- {long}\n  ```\n{long}\n```\n| {long}\n<!-- {long} -->\n{word}\n{}\n", &long[1..]);
    assert_eq!(long_prose(&text), [long.clone(), format!("- {long}")]);
}

#[test]
fn the_readme_is_one_page_and_guides_are_short() {
    let lines = |path: &Path| fs::read_to_string(root().join(path)).unwrap().lines().count();
    let guides = files().into_iter().filter(|path| path.starts_with(GUIDES)).map(|path| (path, GUIDE_LINES));
    let others = [("README.md", README_LINES), OVERVIEW].map(|(path, most)| (PathBuf::from(path), most));
    for (path, most) in guides.chain(others) {
        let lines = lines(&path);
        assert!(lines <= most, "{} has {lines} lines, more than {most}", path.display());
    }
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
