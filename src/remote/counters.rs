//! Counters for people: their values, and what they mean.

use vm_api::counters::counter_texts;
use vm_api::info::VmCounters;

use super::show::table;

/// Formats the counters of each device that are not 0.
pub(crate) fn values(counters: &VmCounters) -> String {
    let mut rows = vec![["DEVICE", "COUNTER", "VALUE"].map(str::to_string).to_vec()];
    for (device, counters) in counters {
        let counted = counters.iter().filter(|(_, value)| **value > 0);
        rows.extend(counted.map(|(name, value)| vec![device.clone(), name.clone(), value.to_string()]));
    }
    if rows.len() == 1 { "no device has counted anything yet\n".to_string() } else { table(&rows) }
}

/// Explains the counter of this name, for each kind of device that has it, or all counters if the name is empty. Kinds
/// with the same text share a line.
///
/// # Errors
///
/// Fails if no device has such a counter.
pub(crate) fn explain(name: &str) -> Result<String, String> {
    let wanted = counter_texts().filter(|text| name.is_empty() || text.name == name);
    let mut shared: Vec<(String, String)> = Vec::new();
    for text in wanted {
        let meaning = format!("{} ({}): {}", text.name, text.unit, text.text);
        match shared.iter_mut().find(|(_, known)| *known == meaning) {
            Some((kinds, _)) => *kinds = format!("{kinds}, {}", text.kind),
            None => shared.push((text.kind.to_string(), meaning)),
        }
    }
    let lines: String = shared.iter().map(|(kinds, meaning)| format!("{kinds} {meaning}\n")).collect();
    if lines.is_empty() {
        return Err(format!("--explain {name}: no device has this counter; --explain without a name lists all"));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_counted_is_shown() {
        let shown = |text: &str| values(&serde_json::from_str(text).unwrap());
        let text = r#"{"pf0": {"rx_frames": 3, "tx_frames": 0}, "pf0v0": {"kicks": 0}}"#;
        assert_eq!(shown(text), "DEVICE  COUNTER    VALUE\npf0     rx_frames  3\n");
        assert_eq!(shown(r#"{"pf0": {"rx_frames": 0}}"#), "no device has counted anything yet\n");
    }

    #[test]
    fn a_counter_is_explained_for_each_kind_that_has_it() {
        let stale = explain("rx_stale").unwrap();
        assert!(stale.starts_with("net rx_stale (frames): Frames that arrived before the driver"), "{stale}");
        let kicks = explain("kicks").unwrap();
        assert!(kicks.contains("net") && kicks.contains("block") && kicks.contains(" kicks ("), "{kicks}");
        let broken = explain("broken_rings").unwrap();
        let sentences: std::collections::BTreeSet<_> =
            broken.lines().map(|line| line.split_once(": ").unwrap().1).collect();
        assert_eq!(sentences.len(), broken.lines().count(), "{broken}");
        assert!(explain("").unwrap().lines().count() > 50);
        assert!(explain("rx_lost").unwrap_err().contains("rx_lost"));
    }
}
