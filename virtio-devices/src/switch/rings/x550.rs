//! Rings of an emulated X550: descriptors of 16 bytes, a head that the NIC moves, and a tail that the driver moves.
//!
//! Head, tail and everything else that a driver sets is in the NIC's registers, which are locked for a moment at the
//! beginning and at the end of a run. Frames pass through a private buffer: the NIC rewrites their beginning when it
//! inserts a tag or a checksum, and no later write of the guest changes what was checked.

mod packet;
mod receive;
mod send;
mod whole;

use std::sync::atomic::Ordering;

use vm_memory::Permissions;

use crate::DmaView;
use crate::queue::ring::BrokenRing;
pub(crate) use receive::{X550Receive, X550Room};
pub(crate) use send::{X550Send, X550Tx};
pub(crate) use whole::Whole;

/// Bytes of a descriptor.
const DESCRIPTOR: usize = x550::descriptor::LEN;

/// The guest address of a descriptor of the ring at `base`.
fn address(base: u64, index: u32) -> u64 {
    base.wrapping_add(u64::from(index) * DESCRIPTOR as u64)
}

/// Reads `data` from guest memory, whose pieces may be anywhere. Returns false if some of it is not there.
fn read(memory: &DmaView, mut address: u64, data: &mut [u8]) -> bool {
    let mut rest = data;
    while !rest.is_empty() {
        let Some(piece) = memory.piece(address, rest.len(), Permissions::Read) else { return false };
        let (now, later) = rest.split_at_mut(piece.len().min(rest.len()));
        if piece.is_empty() {
            return false;
        }
        piece.copy_to(now);
        address = address.wrapping_add(now.len() as u64);
        rest = later;
    }
    true
}

/// Writes `data` to guest memory. Returns false if some of it is not there.
fn write(memory: &DmaView, mut address: u64, mut data: &[u8]) -> bool {
    while !data.is_empty() {
        let Some(piece) = memory.piece(address, data.len(), Permissions::Write) else { return false };
        let (now, later) = data.split_at(piece.len().min(data.len()));
        if now.is_empty() {
            return false;
        }
        piece.copy_from(now);
        address = address.wrapping_add(now.len() as u64);
        data = later;
    }
    true
}

/// Writes `value` to the aligned `address`, after everything that was written before.
///
/// # Errors
///
/// Fails if there is no memory.
fn publish<T: vm_memory::AtomicAccess>(memory: &DmaView, address: u64, value: T) -> Result<(), BrokenRing> {
    let piece = memory.piece(address, size_of::<T>(), Permissions::Write).ok_or(BrokenRing)?;
    vm_memory::Bytes::store(&piece, value, 0, Ordering::Release).map_err(|_| BrokenRing)
}
