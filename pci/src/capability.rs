//! The capability lists of a configuration space.
//!
//! A capability does not contain its offset or its successor. The chain places the capabilities one after the other,
//! and owns the next pointers (`PCIe 6.2 §7.5.1.1.11`, `§7.6.3`).

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
pub(crate) enum Kind {
    Pcie,
    Msix,
    Power,
    /// The n-th vendor-specific capability.
    Vendor(usize),
    Sriov,
    Ari,
    Acs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Link {
    offset: u16,
    len: u16,
    kind: Kind,
    /// The next pointer, at its position in the first dword.
    next: u32,
}

/// Offset of each capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    links: Vec<Link>,
}

/// The capabilities need more than the available 192 bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the capabilities do not fit the first 256 bytes of configuration space")]
pub struct ChainError;

impl Chain {
    /// Places capabilities and extended capabilities, of these lengths in bytes, in order.
    pub(crate) fn new(capabilities: &[(Kind, u16)], extended: &[(Kind, u16)]) -> Result<Self, ChainError> {
        let mut links = place(capabilities, header::FIRST_CAPABILITY, 0x100, 8)?;
        links.extend(place(extended, header::FIRST_EXTENDED_CAPABILITY, 0x1000, 20)?);
        Ok(Self { links })
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
        let next = next.filter(|next| *next <= end).ok_or(ChainError)?;
        if let Some(before) = links.last_mut() {
            before.next = u32::from(offset) << shift;
        }
        links.push(Link { offset, len, kind, next: 0 });
        offset = next;
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
        let chain = Chain::new(&[(Kind::Pcie, 0x3c), (Kind::Vendor(0), 3)], &[(Kind::Sriov, 0x40), (Kind::Ari, 8)]);
        let chain = chain.unwrap();
        let at = |offset| chain.locate(Dword::containing(offset)).map(|(kind, reg, next)| (kind, reg.offset(), next));
        assert_eq!((chain.head(), chain.offset(Kind::Ari), chain.offset(Kind::Acs)), (0x40, Some(0x140), None));
        assert_eq!([0x3c, 0x40, 0x44].map(at), [None, Some((Kind::Pcie, 0, 0x7c00)), Some((Kind::Pcie, 4, 0))]);
        assert_eq!([0x7c, 0x80].map(at), [Some((Kind::Vendor(0), 0, 0)), None]);
        assert_eq!([0x100, 0x140].map(at), [Some((Kind::Sriov, 0, 0x140 << 20)), Some((Kind::Ari, 0, 0))]);
        assert_eq!(at(0x148), None);
    }
}
