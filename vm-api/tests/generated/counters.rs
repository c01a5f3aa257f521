//! The table of counters in docs, and their list in `api/openapi.yaml`.

use vm_api::counters::{CounterText, counter_texts};

/// Line above the list of `VmCounters`, which ends at a line of fewer spaces.
const BEGIN: &str = "        Generated from the definitions of the counters by `cargo xtask generate`:\n";
/// Beginning of the lines of the list.
const INDENT: &str = "        ";
const TABLES: &str = "<!-- by cargo xtask generate, from the definitions of the counters -->\n";

#[test]
fn the_page_of_counters_is_that_of_their_definitions() {
    crate::check("docs/reference/counters.md", |text| {
        let (by_hand, _) = text.split_once(TABLES).unwrap();
        let tables: String = kinds().iter().map(|(kind, texts)| table(kind, texts)).collect();
        format!("{by_hand}{TABLES}{tables}")
    });
}

#[test]
fn the_counters_of_openapi_are_those_of_their_definitions() {
    crate::check("api/openapi.yaml", |text| {
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let is_of_list = |line: &str| line.starts_with(INDENT) || line.trim().is_empty();
        let after: String = rest.split_inclusive('\n').skip_while(|line| is_of_list(line)).collect();
        let list: String = kinds().iter().map(|(kind, texts)| list(kind, texts)).collect();
        format!("{before}{BEGIN}{list}{after}")
    });
}

/// The counters of each kind of device.
fn kinds() -> Vec<(&'static str, Vec<CounterText>)> {
    let mut kinds: Vec<(&'static str, Vec<CounterText>)> = Vec::new();
    for text in counter_texts() {
        match kinds.last_mut().filter(|(kind, _)| *kind == text.kind) {
            Some((_, texts)) => texts.push(text),
            None => kinds.push((text.kind, vec![text])),
        }
    }
    kinds
}

fn table(kind: &str, texts: &[CounterText]) -> String {
    let row = |CounterText { name, unit, is_loss, text, .. }: &CounterText| {
        format!("| `{name}` | {unit}{} | {text} |\n", if *is_loss { ", lost" } else { "" })
    };
    let rows: String = texts.iter().map(row).collect();
    format!("\n## {kind}\n\n| counter | counts | meaning |\n|---|---|---|\n{rows}")
}

fn list(kind: &str, texts: &[CounterText]) -> String {
    let item = |CounterText { name, unit, text, .. }: &CounterText| format!("{INDENT}  - `{name}` ({unit}): {text}\n");
    let items: String = texts.iter().map(item).collect();
    format!("{INDENT}- `{kind}`:\n{items}")
}
