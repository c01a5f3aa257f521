//! The name that a misspelled one was most likely meant to be.

/// The longest name that is compared; no key is as long.
const LONGEST: usize = 32;

/// The one of `names` that `name` is most likely a misspelling of.
pub(crate) fn similar<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    if name.len() > LONGEST {
        return None;
    }
    let edits = names.map(|known| (edits(name.as_bytes(), known.as_bytes()), known));
    let (edits, known) = edits.min_by_key(|(edits, _)| *edits)?;
    // Of a short name, little would be left.
    (edits <= 2 && 3 * edits <= known.len().max(name.len())).then_some(known)
}

/// The number of bytes to insert, remove, replace or swap with the next, to get from `a` to `b`.
fn edits(a: &[u8], b: &[u8]) -> usize {
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for (i, byte) in a.iter().enumerate() {
        let above = &rows[i];
        let mut row = vec![i + 1];
        for (j, other) in b.iter().enumerate() {
            let replaced = above[j] + usize::from(byte != other);
            let mut least = replaced.min(above[j + 1] + 1).min(row[j] + 1);
            let is_swapped = i > 0 && j > 0 && a[i - 1] == *other && b[j - 1] == *byte;
            if is_swapped {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_similar_if_most_of_it_is() {
        let names = ["id", "tap", "trunk", "trust"];
        let of = |name: &str| similar(name, names.into_iter());
        assert_eq!([of("tapp"), of("trnuk"), of("x"), of(&"tap".repeat(20))], [Some("tap"), Some("trunk"), None, None]);
    }
}
