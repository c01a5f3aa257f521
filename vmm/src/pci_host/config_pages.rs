//! Configuration space as memory, so that reads do not exit.
//!
//! A function's registers are rendered into a page of the host. The VM shows that page at the function's place in the
//! ECAM, as read-only memory. The guest's reads are then loads; its writes still exit to this program. Linux makes some
//! 200 reads for each VF that it enables.
//!
//! A page is rendered under the device's lock, together with the write that changed it. Pages are shown and hidden
//! later, without that lock, before the guest's write completes: in between, another vCPU reads what it would have read
//! just before the write. Functions that do not exist have no page; reads of them exit and return all-ones.
//!
//! A function whose driver uses virtio's window into the BARs has no page either, until VFs are enabled or disabled or
//! the device is reset: showing and hiding pages costs all vCPUs, and a driver could cause it again and again. The
//! pages of other functions stay.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pci::{ConfigSpace, Dword, Placement, Reach, Rid};
use virtio_devices::{SriovStatus, VirtioPci};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

/// Bytes of a function's configuration space, and of a page.
pub(crate) const PAGE: u64 = 4096;

/// The most rows of VFs whose pages are shown. Each hidden VF divides a row; VFs beyond the last row are served by
/// exits.
const MAX_ROWS: usize = 64;

/// The pages of consecutive functions.
#[derive(Debug)]
struct Block {
    first: Rid,
    /// Room for all possible functions. Pages that were never rendered use no memory.
    memory: Arc<MmapRegion>,
}

impl Block {
    fn new(first: Rid, functions: u16) -> io::Result<Self> {
        let memory = MmapRegion::new(usize::from(functions) * PAGE as usize).map_err(io::Error::other)?;
        Ok(Self { first, memory: Arc::new(memory) })
    }

    /// Renders function `n` of the block. Beyond the end of configuration space a page is 0 from the start.
    fn render(&self, device: &dyn VirtioPci, n: u16) {
        let rid = self.first.wrapping_add(n);
        let page = self.memory.as_volatile_slice();
        for reg in Dword::all().take_while(|reg| reg.offset() < ConfigSpace::EXTENT) {
            let offset = u64::from(n) * PAGE + u64::from(reg.offset());
            let value = device.config_read(rid, reg).to_le();
            // The block has a page for each of its functions.
            let stored = usize::try_from(offset).map(|offset| page.store(value, offset, Ordering::Relaxed));
            debug_assert!(matches!(stored, Ok(Ok(()))));
        }
    }
}

/// Number of VFs that have pages.
fn num_visible(device: &dyn VirtioPci) -> u16 {
    device.sriov_status().map_or(0, SriovStatus::num_visible)
}

/// Pages to show: `len` bytes of `memory` from `offset` on, at the routing ID `first` of a segment's ECAM.
#[derive(Debug, Clone)]
pub struct Shown {
    /// The segment.
    pub segment: u16,
    /// The first function.
    pub first: Rid,
    /// The pages, in the order of the functions.
    pub memory: Arc<MmapRegion>,
    /// Offset of the first page, a multiple of [`PAGE`].
    pub offset: u64,
    /// Bytes, a multiple of [`PAGE`].
    pub len: u64,
}

impl PartialEq for Shown {
    fn eq(&self, other: &Self) -> bool {
        // The offset follows from the first function.
        self.first == other.first && Arc::ptr_eq(&self.memory, &other.memory) && self.len == other.len
    }
}

/// The pages of a device.
#[derive(Debug)]
pub(crate) struct ConfigPages {
    segment: u16,
    own: Block,
    vfs: Option<Block>,
    /// Functions that had more than registers in configuration space at some time since VFs last changed.
    hidden: BTreeSet<Rid>,
}

impl ConfigPages {
    /// Reserves the pages of the device at `placement`, which use no memory before they are rendered.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot reserve the addresses, or VFs are not consecutive.
    pub(crate) fn new(placement: Placement) -> io::Result<Self> {
        let vfs = match placement.vfs {
            Some(vfs) if vfs.vf_stride == 1 => {
                Some(Block::new(placement.rid.wrapping_add(vfs.first_vf_offset), vfs.total_vfs)?)
            }
            Some(_) => return Err(io::ErrorKind::Unsupported.into()),
            None => None,
        };
        let (segment, own) = (placement.segment, Block::new(placement.rid, 1)?);
        Ok(Self { segment, own, vfs, hidden: BTreeSet::new() })
    }

    /// Renders the pages of the functions in `reach`. Returns true if the result of [`Self::shown`] changes for another
    /// reason than VFs that were enabled or disabled.
    pub(crate) fn refresh(&mut self, device: &dyn VirtioPci, reach: Reach) -> bool {
        let were_hidden = self.hidden.len();
        let before = if reach == Reach::Device { std::mem::take(&mut self.hidden) } else { BTreeSet::new() };
        match reach {
            Reach::Nothing => {}
            Reach::Function(rid) => self.refresh_function(device, rid),
            Reach::Device => {
                self.refresh_function(device, self.own.first);
                for n in 0..num_visible(device) {
                    let first = self.vfs.as_ref().map(|vfs| vfs.first);
                    first.into_iter().for_each(|first| self.refresh_function(device, first.wrapping_add(n)));
                }
            }
        }
        if reach == Reach::Device { before != self.hidden } else { were_hidden != self.hidden.len() }
    }

    fn refresh_function(&mut self, device: &dyn VirtioPci, rid: Rid) {
        let (block, n) = match &self.vfs {
            _ if rid == self.own.first => (&self.own, 0),
            Some(vfs) => match rid.to_bits().checked_sub(vfs.first.to_bits()) {
                Some(n) if n < num_visible(device) => (vfs, n),
                _ => return,
            },
            None => return,
        };
        if device.config_is_static(rid) {
            block.render(device, n);
        } else {
            self.hidden.insert(rid);
        }
    }

    /// The pages to show now, in the order of the functions: those of all that exist and are not hidden.
    pub(crate) fn shown(&self, device: &dyn VirtioPci) -> Vec<Shown> {
        let mut shown = Vec::new();
        self.rows(&self.own, 1, &mut shown);
        if let Some(vfs) = &self.vfs {
            self.rows(vfs, num_visible(device), &mut shown);
        }
        shown
    }

    /// Appends the pages of the first `functions` functions of a block, in rows between the hidden ones.
    fn rows(&self, block: &Block, functions: u16, out: &mut Vec<Shown>) {
        let hidden = self.hidden.range(block.first..).map(|rid| rid.to_bits().saturating_sub(block.first.to_bits()));
        let mut start = 0;
        for end in hidden.take_while(|n| *n < functions).chain([functions]).take(MAX_ROWS) {
            if end > start {
                out.push(Shown {
                    segment: self.segment,
                    first: block.first.wrapping_add(start),
                    memory: Arc::clone(&block.memory),
                    offset: u64::from(start) * PAGE,
                    len: u64::from(end - start) * PAGE,
                });
            }
            start = end.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests;
