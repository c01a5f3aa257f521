//! Indices of VFs, as the table of PFs and VFs takes them.

use std::ops::RangeInclusive;
use std::str::FromStr;

/// Indices of VFs: numbers and ranges.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Indices(Vec<RangeInclusive<u16>>);

impl FromStr for Indices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = first.parse().ok()?..=last.parse().ok()?;
            (!range.is_empty()).then_some(range)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        ranges.map(Self).ok_or_else(|| "give indices of VFs, such as 3 or 0-7,12".to_string())
    }
}

impl Indices {
    /// True if the index is one of them.
    pub(crate) fn has(&self, index: u16) -> bool {
        self.0.iter().any(|range| range.contains(&index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_indices_are_refused() {
        for wrong in ["", "a", "3-1", "1,", "-", "70000"] {
            assert!(wrong.parse::<Indices>().is_err(), "{wrong}");
        }
    }
}
