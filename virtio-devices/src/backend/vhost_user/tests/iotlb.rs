//! A peer's cache of translations for a function behind an IOMMU.

use std::collections::VecDeque;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use vm_memory::Permissions;

use super::super::message::u64_at;
use crate::backend::iotlb::Miss;
use crate::memory::{DmaFollower, DmaMapping, NotFollowed, Translate};

/// A cache of mappings that evicts the oldest.
pub(crate) struct Iotlb {
    entries: Mutex<VecDeque<DmaMapping>>,
    room: usize,
    /// The misses that are not sent yet, and the addresses of those that are.
    misses: Mutex<(Vec<Miss>, Vec<u64>)>,
    pass: RwLock<()>,
}

impl Iotlb {
    pub(crate) fn with_room(room: usize) -> Self {
        Self { entries: Mutex::default(), room, misses: Mutex::default(), pass: RwLock::new(()) }
    }

    /// Processes a message. `target` converts an address of the other process to one of the guest. Returns the
    /// message's name.
    pub(crate) fn learn(&self, payload: &[u8], target: impl Fn(u64) -> u64) -> String {
        assert_eq!(payload.len(), 32);
        let [first, len, host] = [0, 8, 16].map(|at| u64_at(payload, at).unwrap());
        let (access, last) = (payload[24], first + (len - 1));
        let mut entries = self.entries.lock();
        match payload[25] {
            2 => {
                let access = match access {
                    1 => Permissions::Read,
                    2 => Permissions::Write,
                    3 => Permissions::ReadWrite,
                    other => panic!("the accesses {other}"),
                };
                let target = target(host);
                entries.push_back(DmaMapping { first, last, target, access });
                if entries.len() > self.room {
                    entries.pop_front();
                }
                self.misses.lock().1.retain(|address| !(first..=last).contains(address));
                format!("UPDATE {first:#x}+{len:#x}={target:#x} {access:?}")
            }
            3 => {
                entries.retain(|entry| entry.last < first || entry.first > last);
                // It may stand for something else by now.
                self.misses.lock().1.retain(|address| !(first..=last).contains(address));
                format!("INVALIDATE {first:#x}+{len:#x}")
            }
            other => panic!("a message about {other}"),
        }
    }

    /// Takes the misses to send.
    pub(crate) fn misses(&self) -> Vec<Miss> {
        std::mem::take(&mut self.misses.lock().0)
    }
}

impl Translate for Iotlb {
    fn begin(&self) -> RwLockReadGuard<'_, ()> {
        self.pass.read()
    }

    fn is_bypassed(&self) -> bool {
        false
    }

    fn translate(&self, address: u64, len: u64, access: Permissions) -> Option<(u64, u64)> {
        let entries = self.entries.lock();
        let entry = entries.iter().find(|entry| (entry.first..=entry.last).contains(&address));
        if let Some(entry) = entry.filter(|entry| entry.access.allow(access)) {
            return Some((entry.target + (address - entry.first), len.min(entry.last - address + 1)));
        }
        let (misses, asked) = &mut *self.misses.lock();
        if !asked.contains(&address) {
            misses.push(Miss { address, access });
            asked.push(address);
        }
        None
    }

    fn mapping(&self, _: u64, _: Permissions) -> Option<DmaMapping> {
        panic!("a peer has no followers")
    }

    fn follow(&self, _: Option<std::sync::Arc<dyn DmaFollower>>) -> Result<(), NotFollowed> {
        panic!("a peer has no followers")
    }
}
