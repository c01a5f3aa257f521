//! The chain of capabilities of a configuration space.
//!
//! A capability does not know where it is nor which one is next: the chain places them, one after the other, and owns the next
//! pointers (`PCIe 6.2 §7.5.1.1.11`).

use crate::spec::{self, capability_id, header};
use crate::{Dword, DwordWrite};

/// A vendor-specific capability, of which virtio has several (`virtio 1.4 §4.1.4`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VendorCapability {
    /// What follows the capability ID and the next pointer: begins with the length of the whole capability.
    pub body: Vec<u8>,
    /// For each byte of `body`, the bits that software may write.
    pub writable: Vec<u8>,
}

impl VendorCapability {
    /// Bytes of the capability with its two header bytes.
    fn len(&self) -> usize {
        2 + self.body.len()
    }

    /// Sets what software may write to what it is in `saved`, a body of the same length.
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

/// Which capability of a function a place in the chain belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Pcie,
    Msix,
    Power,
    /// The n-th vendor-specific capability.
    Vendor(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Link {
    offset: u16,
    len: u16,
    kind: Kind,
}

/// Where each capability is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    links: Vec<Link>,
}

/// The capabilities need more than the 192 bytes that there are for them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the capabilities do not fit the first 256 bytes of configuration space")]
pub struct ChainError;

impl Chain {
    /// Places the capabilities in order.
    pub(crate) fn new(power: bool, vendor: &[VendorCapability]) -> Result<Self, ChainError> {
        let mut links = Vec::with_capacity(3 + vendor.len());
        let mut offset = header::FIRST_CAPABILITY;
        let mut place = |kind, len: u16| {
            let next = offset.checked_add(len.next_multiple_of(4)).filter(|next| *next <= 0x100).ok_or(ChainError)?;
            links.push(Link { offset, len, kind });
            offset = next;
            Ok(())
        };
        place(Kind::Pcie, spec::pcie::LEN)?;
        place(Kind::Msix, spec::msix::LEN)?;
        if power {
            place(Kind::Power, spec::power::LEN)?;
        }
        for (n, capability) in vendor.iter().enumerate() {
            place(Kind::Vendor(n), u16::try_from(capability.len()).map_err(|_| ChainError)?)?;
        }
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

    /// The capability that `reg` belongs to, the dword within it, and, for its first dword, the offset of the next one.
    pub(crate) fn locate(&self, reg: Dword) -> Option<(Kind, Dword, u16)> {
        let offset = reg.offset();
        let n = self.links.iter().position(|link| offset >= link.offset && offset - link.offset < link.len)?;
        let link = self.links.get(n)?;
        let next = if offset == link.offset { self.links.get(n + 1).map_or(0, |next| next.offset) } else { 0 };
        Some((link.kind, Dword::containing(offset - link.offset), next))
    }
}
