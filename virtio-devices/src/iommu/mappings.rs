//! The mappings of a domain: ranges of I/O addresses and their guest addresses.

use std::collections::BTreeMap;

use vm_memory::Permissions;

use super::status::Status;
use crate::memory::DmaMapping;

/// A range of I/O addresses, both ends included, so that it can contain the last address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// The first address.
    pub first: u64,
    /// The last address, not below the first.
    pub last: u64,
}

/// Target of a range of I/O addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    last: u64,
    /// The guest address of the first.
    target: u64,
    access: Permissions,
}

/// Disjoint mappings by their first I/O address.
#[derive(Debug, Default)]
pub(crate) struct Mappings(BTreeMap<u64, Mapping>);

impl Mappings {
    /// Number of mappings.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Maps `range` to the guest addresses from `target`, which must not wrap around.
    ///
    /// # Errors
    ///
    /// [`Status::Invalid`], if a part of it is mapped already.
    pub(crate) fn insert(&mut self, range: Range, target: u64, access: Permissions) -> Result<(), Status> {
        let before = self.0.range(..=range.last).next_back();
        if before.is_some_and(|(_, mapping)| mapping.last >= range.first) {
            return Err(Status::Invalid);
        }
        self.0.insert(range.first, Mapping { last: range.last, target, access });
        Ok(())
    }

    /// Removes all mappings in `range`, and returns them in order.
    ///
    /// # Errors
    ///
    /// [`Status::Range`], if a mapping would be split. Nothing is removed then.
    pub(crate) fn remove(&mut self, range: Range) -> Result<Vec<DmaMapping>, Status> {
        let reaches_in = self.0.range(..range.first).next_back().is_some_and(|(_, before)| before.last >= range.first);
        let inside = self.0.range(range.first..=range.last);
        let reaches_out = inside.clone().next_back().is_some_and(|(_, mapping)| mapping.last > range.last);
        if reaches_in || reaches_out {
            return Err(Status::Range);
        }
        // Many mappings in the range are removed one by one: the cost is that of having mapped them.
        let removed: Vec<_> = inside.map(whole).collect();
        for mapping in &removed {
            self.0.remove(&mapping.first);
        }
        Ok(removed)
    }

    /// Translates the first piece of the `len` bytes at `address`, at least one: its guest address and its length.
    /// `None` if `address` is not mapped, or not for `access`.
    pub(crate) fn translate(&self, address: u64, len: u64, access: Permissions) -> Option<(u64, u64)> {
        let mapping = self.find(address, access)?;
        // One less than the bytes that are left, which may be 2^64.
        let rest = mapping.last - address;
        Some((mapping.target.wrapping_add(address - mapping.first), len.min(rest.saturating_add(1))))
    }

    /// The mapping of `address`, if it allows `access`.
    pub(crate) fn find(&self, address: u64, access: Permissions) -> Option<DmaMapping> {
        let before = self.0.range(..=address).next_back().map(whole);
        before.filter(|mapping| mapping.last >= address && mapping.access.allow(access))
    }

    /// All of them, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = DmaMapping> {
        self.0.iter().map(whole)
    }
}

fn whole((first, mapping): (&u64, &Mapping)) -> DmaMapping {
    let Mapping { last, target, access } = *mapping;
    DmaMapping { first: *first, last, target, access }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(first: u64, last: u64) -> Range {
        Range { first, last }
    }

    #[test]
    fn a_mapping_reaches_the_last_address_and_bounds_each_piece() {
        let mut mappings = Mappings::default();
        mappings.insert(range(u64::MAX - 0xfff, u64::MAX), 0x5000, Permissions::Read).unwrap();
        assert_eq!(mappings.translate(u64::MAX, 8, Permissions::Read), Some((0x5fff, 1)));
        assert_eq!(mappings.translate(u64::MAX - 0xfff, 8, Permissions::Read), Some((0x5000, 8)));
        let mut all = Mappings::default();
        all.insert(range(0, u64::MAX), 0, Permissions::ReadWrite).unwrap();
        assert_eq!(all.translate(0, u64::MAX, Permissions::Write), Some((0, u64::MAX)));
        assert_eq!(all.insert(range(0, 0), 0, Permissions::Read), Err(Status::Invalid));
    }

    #[test]
    fn an_access_that_a_mapping_does_not_allow_finds_nothing() {
        let mut mappings = Mappings::default();
        mappings.insert(range(0x1000, 0x1fff), 0x9000, Permissions::Read).unwrap();
        assert_eq!(mappings.translate(0x1800, 0x1000, Permissions::Read), Some((0x9800, 0x800)));
        assert_eq!(mappings.translate(0x1800, 1, Permissions::Write), None);
        assert_eq!(mappings.translate(0x1800, 1, Permissions::ReadWrite), None);
        assert_eq!(mappings.translate(0x2000, 1, Permissions::Read), None);
        assert_eq!(mappings.translate(0xfff, 1, Permissions::Read), None);
    }

    #[test]
    fn a_removal_that_would_split_a_mapping_removes_nothing() {
        let mut mappings = Mappings::default();
        mappings.insert(range(0x1000, 0x2fff), 0, Permissions::Read).unwrap();
        mappings.insert(range(0x3000, 0x3fff), 0, Permissions::Read).unwrap();
        for split in [range(0x2000, 0x3fff), range(0x0, 0x1fff), range(0x2000, 0x2fff)] {
            assert_eq!(mappings.remove(split), Err(Status::Range));
        }
        assert_eq!(mappings.len(), 2);
        let removed = mappings.remove(range(0, u64::MAX)).unwrap();
        assert_eq!(removed.iter().map(|mapping| mapping.first).collect::<Vec<_>>(), [0x1000, 0x3000]);
        assert_eq!(mappings.remove(range(0, 0xfff)), Ok(Vec::new()));
    }
}
