//! Descriptions of all counters, by the kind of device in names of metrics.

use crate::devices::kind::COUNTERS;

/// The sentence that explains a counter of a kind of device; empty for an unknown one.
pub(super) fn text_of(kind: &str, counter: &str) -> &'static str {
    let texts = COUNTERS.iter().filter(|(known, _)| *known == kind).flat_map(|(_, texts)| *texts);
    texts.into_iter().find(|text| text.name == counter).map_or("", |text| text.text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;
    use std::{env, fs};

    use virtio_devices::CounterText;

    use super::*;

    /// All counters, each with its kind.
    fn all() -> impl Iterator<Item = (&'static str, CounterText)> {
        COUNTERS.into_iter().flat_map(|(kind, texts)| texts.iter().map(move |text| (kind, *text)))
    }

    /// Number of words of a text that its counter's name does not have.
    fn new_words(text: &CounterText) -> usize {
        let of_name: HashSet<_> = text.name.split('_').collect();
        let words = text.text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
        words.filter(|word| word.len() > 2 && !of_name.contains(word.as_str())).count()
    }

    #[test]
    fn each_counter_has_a_text_that_is_not_its_name() {
        for (kind, text) in all() {
            let CounterText { name, unit, text: sentence, .. } = text;
            let is_sentence = sentence.starts_with(|c: char| c.is_ascii_uppercase()) && sentence.ends_with('.');
            assert!(is_sentence && new_words(&text) >= 3, "{kind} {name}: {sentence}");
            assert!(!sentence.contains("vm.counters") && !sentence.contains(name) || name == "bytes", "{kind} {name}");
            let is_plain = |c: char| (' '..='~').contains(&c) && !['|', '\\', '"'].contains(&c);
            assert!(sentence.chars().all(is_plain) && sentence.len() < 130, "{kind} {name}: {sentence}");
            assert!(unit.ends_with('s') && name.chars().all(|c| c == '_' || c.is_ascii_lowercase()), "{kind} {name}");
            assert_eq!(text_of(kind, name), sentence);
        }
        let names: HashSet<_> = all().map(|(kind, text)| (kind, text.name)).collect();
        assert_eq!((names.len(), text_of("net", "none")), (all().count(), ""));
    }

    #[test]
    fn the_table_that_clients_have_is_that_of_the_counters() {
        let line = |(kind, text): (&str, CounterText)| {
            let loss = if text.is_loss { "loss" } else { "count" };
            format!("{kind}\t{}\t{}\t{loss}\t{}\n", text.name, text.unit, text.text)
        };
        let table: String = all().map(line).collect();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-api/src/counters.tsv");
        if env::var_os("REWRITE_GENERATED_FILES").is_some() {
            fs::write(path, table).unwrap();
            return;
        }
        assert!(fs::read_to_string(path).unwrap() == table, "counters.tsv is stale; run cargo xtask generate");
    }
}
