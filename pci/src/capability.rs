//! The capability lists of a configuration space.
//!
//! A capability does not contain its offset or its successor. The chain places the capabilities one after the other, or
//! at given offsets, and owns the next pointers (`PCIe 6.2 §7.5.1.1.11`, `§7.6.3`).

pub(crate) mod aer;
pub(crate) mod msix;
pub(crate) mod pcie;
pub(crate) mod power;

use crate::spec::{capability_id, header};
use crate::{Dword, DwordWrite};

/// A vendor-specific capability; virtio has several of them (`virtio 1.4 §4.1.4`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VendorCapability {
    /// Bytes after the capability ID and the next pointer: a byte with the length of the whole capability, then its
    /// data.
    pub body: Vec<u8>,
    /// For each byte of `body`, the writable bits. The length byte has none.
    pub writable: Vec<u8>,
}

/// Reason why a vendor-specific capability is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VendorError {
    /// The body is empty.
    #[error("it has no body; a body begins with the length byte")]
    NoBody,
    /// The length byte is wrong. It counts the capability ID and the next pointer too.
    #[error("its length byte says {says} bytes, and it has {len}")]
    Length {
        /// The length byte.
        says: u8,
        /// The length of the capability: that of the body plus two.
        len: usize,
    },
    /// The mask of writable bits is not as long as the body.
    #[error("its writable mask has {mask} bytes, its body {body}")]
    Mask {
        /// The length of the mask.
        mask: usize,
        /// The length of the body.
        body: usize,
    },
    /// Software could write the length byte.
    #[error("its length byte is writable")]
    WritableLength,
}

impl VendorCapability {
    /// Checks the capability, and returns its length with the two header bytes.
    pub(crate) fn check(&self) -> Result<u16, VendorError> {
        let (body, mask) = (self.body.len(), self.writable.len());
        let Some(&says) = self.body.first() else { return Err(VendorError::NoBody) };
        if usize::from(says) != body + 2 {
            return Err(VendorError::Length { says, len: body + 2 });
        }
        if mask != body {
            return Err(VendorError::Mask { mask, body });
        }
        match self.writable.first() {
            Some(0) => Ok(says.into()),
            _ => Err(VendorError::WritableLength),
        }
    }
    /// Sets the writable bits to those of `saved`, a body of the same length.
    pub(crate) fn restore(&mut self, saved: &[u8]) {
        for ((byte, writable), saved) in self.body.iter_mut().zip(&self.writable).zip(saved) {
            *byte = *byte & !writable | saved & writable;
        }
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub(crate) fn read(&self, reg: Dword) -> u32 {
        let byte = |offset: u16| match offset {
            0 => capability_id::VENDOR,
            1 => 0,
            offset => self.body.get(usize::from(offset) - 2).copied().unwrap_or(0),
        };
        let offset = reg.offset();
        u32::from_le_bytes([byte(offset), byte(offset + 1), byte(offset + 2), byte(offset + 3)])
    }

    /// Writes the dword at `reg` from the start of the capability.
    pub(crate) fn write(&mut self, reg: Dword, write: DwordWrite) {
        let written = write.value().to_le_bytes().into_iter().zip(write.mask().to_le_bytes());
        for (offset, (value, mask)) in (reg.offset()..).zip(written) {
            let Some(n) = usize::from(offset).checked_sub(2) else { continue };
            if let (Some(byte), Some(writable)) = (self.body.get_mut(n), self.writable.get(n)) {
                let mask = mask & writable;
                *byte = *byte & !mask | value & mask;
            }
        }
    }
}

/// A capability of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// PCI Express.
    Pcie,
    /// MSI-X.
    Msix,
    /// Power management.
    Power,
    /// The n-th vendor-specific capability, counted from 0.
    Vendor(usize),
    /// SR-IOV.
    Sriov,
    /// Alternative Routing-ID Interpretation.
    Ari,
    /// Access Control Services.
    Acs,
    /// Advanced Error Reporting.
    Aer,
    /// Device Serial Number.
    SerialNumber,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Link {
    offset: u16,
    len: u16,
    kind: Kind,
    /// The next pointer, at its position in the first dword.
    next: u32,
}

/// End of the extended capabilities.
pub(crate) const EXTENT: u16 = 0x1a0;

/// Offset of each capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    links: Vec<Link>,
}

/// Reason why capabilities have no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The capabilities need more than the available 192 bytes.
    #[error("the capabilities do not fit the first 256 bytes of configuration space")]
    TooLong,
    /// Offsets are given, and this capability has none.
    #[error("offsets of capabilities are given, and {0:?} has none; give it one")]
    NoOffset(Kind),
    /// The capability overlaps another one, is not aligned to 4 bytes, or is beyond its part of configuration space.
    #[error(
        "capability {kind:?} cannot be at {offset:#x}; give a free multiple of 4 in its part of configuration space"
    )]
    Offset {
        /// The capability.
        kind: Kind,
        /// The given offset.
        offset: u16,
    },
}

impl Chain {
    /// Places capabilities and extended capabilities, of these lengths in bytes: in order, or at `offsets` if there are
    /// any.
    pub(crate) fn new(
        capabilities: &[(Kind, u16)],
        extended: &[(Kind, u16)],
        offsets: &[(Kind, u16)],
    ) -> Result<Self, ChainError> {
        let (first, first_extended) = (header::FIRST_CAPABILITY, header::FIRST_EXTENDED_CAPABILITY);
        let links = if offsets.is_empty() {
            let mut links = place(capabilities, first, first_extended, 8)?;
            links.extend(place(extended, first_extended, 0x1000, 20)?);
            links
        } else {
            let mut links = place_at(capabilities, offsets, first, first_extended, 8)?;
            links.extend(place_at(extended, offsets, first_extended, EXTENT, 20)?);
            links
        };
        let extended = links.iter().find(|link| link.offset >= first_extended);
        match extended.filter(|link| link.offset > first_extended) {
            // Software begins there.
            Some(&Link { kind, offset, .. }) => Err(ChainError::Offset { kind, offset }),
            None => Ok(Self { links }),
        }
    }

    /// The offset of the first capability.
    pub(crate) fn head(&self) -> u16 {
        self.links.first().map_or(0, |link| link.offset)
    }

    /// The offset of `kind`.
    pub(crate) fn offset(&self, kind: Kind) -> Option<u16> {
        self.links.iter().find(|link| link.kind == kind).map(|link| link.offset)
    }

    /// The capability at `reg`, the dword within it, and the next pointer if `reg` holds it.
    pub(crate) fn locate(&self, reg: Dword) -> Option<(Kind, Dword, u32)> {
        let offset = reg.offset();
        let link = self.links.iter().find(|link| offset >= link.offset && offset - link.offset < link.len)?;
        let next = if offset == link.offset { link.next } else { 0 };
        Some((link.kind, Dword::containing(offset - link.offset), next))
    }
}

/// Places capabilities between `first` and `end`, with their next pointers from bit `shift` on.
fn place(capabilities: &[(Kind, u16)], first: u16, end: u16, shift: u32) -> Result<Vec<Link>, ChainError> {
    let mut links: Vec<Link> = Vec::with_capacity(capabilities.len());
    let mut offset = first;
    for &(kind, len) in capabilities {
        let next = len.checked_next_multiple_of(4).and_then(|len| offset.checked_add(len));
        let next = next.filter(|next| *next <= end).ok_or(ChainError::TooLong)?;
        if let Some(before) = links.last_mut() {
            before.next = u32::from(offset) << shift;
        }
        links.push(Link { offset, len, kind, next: 0 });
        offset = next;
    }
    Ok(links)
}

/// Places capabilities at `offsets` between `first` and `end`, in ascending order, with their next pointers from bit
/// `shift` on.
fn place_at(
    capabilities: &[(Kind, u16)],
    offsets: &[(Kind, u16)],
    first: u16,
    end: u16,
    shift: u32,
) -> Result<Vec<Link>, ChainError> {
    let mut links: Vec<Link> = Vec::with_capacity(capabilities.len());
    for &(kind, len) in capabilities {
        let given = offsets.iter().find(|(of, _)| *of == kind);
        let &(_, offset) = given.ok_or(ChainError::NoOffset(kind))?;
        links.push(Link { offset, len, kind, next: 0 });
    }
    links.sort_by_key(|link| link.offset);
    let mut free = first;
    for &Link { offset, len, kind, .. } in &links {
        let after = len.checked_next_multiple_of(4).and_then(|len| offset.checked_add(len));
        let after = after.filter(|after| offset % 4 == 0 && offset >= free && *after <= end);
        free = after.ok_or(ChainError::Offset { kind, offset })?;
    }
    let nexts: Vec<_> = links.iter().skip(1).map(|link| u32::from(link.offset) << shift).collect();
    for (link, next) in links.iter_mut().zip(nexts) {
        link.next = next;
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B20: impossible capabilities are an error when configured.
    #[test]
    fn impossible_vendor_capabilities_are_refused() {
        let check = |body: &[u8], writable: &[u8]| {
            VendorCapability { body: body.to_vec(), writable: writable.to_vec() }.check().map_err(|e| e.to_string())
        };
        let refused = |what: &str| Err(what.to_string());
        assert_eq!(check(&[3], &[0]), Ok(3));
        assert_eq!(check(&[4, 0xaa], &[0, 0xff]), Ok(4));
        assert_eq!(check(&[], &[]), refused("it has no body; a body begins with the length byte"));
        assert_eq!(check(&[2, 0], &[0, 0]), refused("its length byte says 2 bytes, and it has 4"));
        assert_eq!(check(&[4, 0], &[0]), refused("its writable mask has 1 bytes, its body 2"));
        assert_eq!(check(&[4, 0], &[1, 0]), refused("its length byte is writable"));
        let (body, writable) = (vec![2; 300], vec![0; 300]);
        assert!(VendorCapability { body, writable }.check().is_err(), "no length byte says 302");
    }

    #[test]
    fn both_chains_end_and_do_not_overlap() {
        let chain =
            Chain::new(&[(Kind::Pcie, 0x3c), (Kind::Vendor(0), 3)], &[(Kind::Sriov, 0x40), (Kind::Ari, 8)], &[]);
        let chain = chain.unwrap();
        let at = |offset| chain.locate(Dword::containing(offset)).map(|(kind, reg, next)| (kind, reg.offset(), next));
        assert_eq!((chain.head(), chain.offset(Kind::Ari), chain.offset(Kind::Acs)), (0x40, Some(0x140), None));
        assert_eq!([0x3c, 0x40, 0x44].map(at), [None, Some((Kind::Pcie, 0, 0x7c00)), Some((Kind::Pcie, 4, 0))]);
        assert_eq!([0x7c, 0x80].map(at), [Some((Kind::Vendor(0), 0, 0)), None]);
        assert_eq!([0x100, 0x140].map(at), [Some((Kind::Sriov, 0, 0x140 << 20)), Some((Kind::Ari, 0, 0))]);
        assert_eq!(at(0x148), None);
    }

    const CAPABILITIES: [(Kind, u16); 3] = [(Kind::Pcie, 0x3c), (Kind::Msix, 12), (Kind::Power, 8)];
    const EXTENDED: [(Kind, u16); 2] = [(Kind::Sriov, 0x40), (Kind::Aer, 0x2c)];

    fn at(offsets: [u16; 5]) -> Result<Chain, ChainError> {
        let kinds = CAPABILITIES.iter().chain(&EXTENDED).map(|(kind, _)| *kind);
        Chain::new(&CAPABILITIES, &EXTENDED, &kinds.zip(offsets).collect::<Vec<_>>())
    }

    #[test]
    fn capabilities_at_given_offsets_are_chained_in_ascending_order() {
        let chain = at([0xa0, 0x70, 0x40, 0x160, 0x100]).unwrap();
        let next = |offset| chain.locate(Dword::containing(offset)).map(|(kind, _, next)| (kind, next));
        assert_eq!(chain.head(), 0x40);
        let expected = [(Kind::Power, 0x7000), (Kind::Msix, 0xa000), (Kind::Pcie, 0)];
        assert_eq!([0x40, 0x70, 0xa0].map(next), expected.map(Some));
        assert_eq!([0x100, 0x160].map(next), [(Kind::Aer, 0x160 << 20), (Kind::Sriov, 0)].map(Some));
        assert_eq!([0x48, 0x7c, 0xdc, 0x12c, 0x1a0].map(next), [None; 5]);
    }

    #[test]
    fn impossible_offsets_are_refused() {
        let refused = |offsets, kind, offset| {
            assert_eq!(at(offsets), Err(ChainError::Offset { kind, offset }), "{offsets:x?}");
        };
        refused([0xa0, 0x70, 0x3c, 0x160, 0x100], Kind::Power, 0x3c);
        refused([0xa0, 0x9c, 0x40, 0x160, 0x100], Kind::Pcie, 0xa0);
        refused([0xa0, 0x72, 0x40, 0x160, 0x100], Kind::Msix, 0x72);
        refused([0xc8, 0x70, 0x40, 0x160, 0x100], Kind::Pcie, 0xc8);
        refused([0xa0, 0x70, 0x40, 0x160, 0x120], Kind::Aer, 0x120);
        refused([0xa0, 0x70, 0x40, 0x164, 0x100], Kind::Sriov, 0x164);
        let missing = Chain::new(&CAPABILITIES, &[], &[(Kind::Pcie, 0xa0), (Kind::Power, 0x40)]);
        assert_eq!(missing, Err(ChainError::NoOffset(Kind::Msix)));
    }
}
