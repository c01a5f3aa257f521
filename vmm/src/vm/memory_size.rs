//! Changes of the size of the guest's memory: at once while the guest runs, or from its next start on.

use std::time::Duration;

use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use crate::arch::x86_64::layout::MEMORY_BLOCK;
use crate::config::{HotplugMethod, MemoryConfig, bytes};
use crate::pci_host::memory_slots::LAST_MEMORY;
use crate::vm::addresses::{apertures, layout_of};
use crate::vm::{Vm, VmError};

impl Vm {
    /// The time until [`Self::reclaim`] has work, if it may have any.
    pub(crate) fn wait_to_reclaim(&self) -> Option<Duration> {
        if self.running.is_none() || self.is_paused() { None } else { self.reclaiming.wait() }
    }

    /// Gives pages of unplugged memory back to the host, if that is due.
    pub(crate) fn reclaim(&mut self) {
        if self.wait_to_reclaim().is_some() {
            let is_filled = self.ram.filling().is_none_or(|progress| progress.is_done());
            self.reclaiming.reclaim(&self.ram.memory().memory(), &self.mem_regions, is_filled);
        }
    }

    /// Memory of the guest in bytes, without that of memory devices.
    pub(crate) fn present_memory(&self) -> u64 {
        self.ram.size()
    }

    /// Gives the guest the memory `next`, which differs from the present memory in sizes only. Drivers of memory
    /// devices are asked to plug or unplug. Without memory devices, memory is added at once if the VM has room for it,
    /// or else at the next start; nothing is taken from a running guest.
    ///
    /// # Errors
    ///
    /// Fails if the VM cannot have so much memory, or so little, or a backend cannot reach the added memory. Nothing
    /// has changed then.
    pub fn resize_memory(&mut self, next: MemoryConfig) -> Result<(), VmError> {
        if next.hotplug_method == HotplugMethod::VirtioMem {
            self.mem_regions.resize(&next);
            self.memory = next;
            return Ok(());
        }
        let size = next.size;
        // The VM must be able to start with the new memory.
        let layout = layout_of(&next, self.address_bits)?;
        self.payload.as_ref().map_or(Ok(()), |payload| payload.check_fits(&layout))?;
        let present = self.ram.size();
        if size > present && next.room().is_some() {
            self.add_memory(size - present)?;
        }
        self.memory = next;
        Ok(())
    }

    /// Adds `more` bytes of memory to a running guest.
    fn add_memory(&mut self, more: u64) -> Result<(), VmError> {
        let size = self.ram.size();
        if !more.is_multiple_of(MEMORY_BLOCK) {
            return Err(VmError::MemoryStep { size, more });
        }
        let Some(running) = &self.running else { return Ok(()) };
        let (start, room) = self.free_addresses();
        if more > room {
            return Err(VmError::MemoryRoom { more, room });
        }
        if !self.ged.with_memory(|memory| memory.has_room()) {
            return Err(VmError::MemorySlots);
        }
        let old = self.ram.memory().memory();
        let slot = u32::try_from(old.num_regions()).unwrap_or(u32::MAX);
        if slot > LAST_MEMORY {
            return Err(VmError::MemoryRegions);
        }
        let range = start..start + more;
        let new = self.ram.grown(&range)?;
        self.devices.set_memory(&old, &new)?;
        let added = new.find_region(GuestAddress(start)).map_or(Ok(()), |region| {
            // SAFETY: the region is a mapping of guest memory, to which no references are made; `self` keeps it mapped
            // for longer than this VM and its vCPUs live.
            unsafe { running.powered.vm.set_memory(slot, start, region.as_ptr(), more) }
        });
        if let Err(error) = added {
            self.devices.set_memory(&new, &old)?;
            return Err(error.into());
        }
        self.ram.set(new);
        self.ged.with_memory(|memory| memory.add(range));
        Ok(())
    }

    /// Address at which memory is added next, and the size that can be added, in bytes.
    fn free_addresses(&self) -> (u64, u64) {
        let area = &self.layout.hotplug;
        let last = self.ram.memory().memory().last_addr().0;
        let start = if area.contains(&last) { last + 1 } else { area.start };
        (start, area.end - start)
    }

    /// Makes memory that was added a part of the guest's memory at its next start. If the size changes, allocates new
    /// memory, or keeps the present memory if that fails.
    pub(super) fn settle_memory(&mut self) {
        if self.ram.is_image() {
            // Pages discarded from a file mapping would show the file's contents again.
            if let Err(error) = self.exchange_memory() {
                log::warn!("the guest keeps its memory, which is written with zeros: {error}");
            }
            return;
        }
        if self.memory.hotplug_method == HotplugMethod::VirtioMem {
            return;
        }
        if self.ram.size() == self.memory.total() {
            self.layout.plugged = self.layout.hotplug.start..self.free_addresses().0;
        } else if let Err(error) = self.exchange_memory() {
            log::warn!("the guest keeps {} of memory: {error}", bytes(self.ram.size()));
            self.layout.plugged = self.layout.hotplug.start..self.free_addresses().0;
        }
    }

    fn exchange_memory(&mut self) -> Result<(), VmError> {
        let layout = layout_of(&self.memory, self.address_bits)?;
        let new = self.ram.anew(self.memory.size, &layout)?;
        self.devices.set_memory(&self.ram.memory().memory(), &new)?;
        self.ram.set(new);
        self.devices.set_apertures(apertures(&layout, &self.segments));
        self.layout = layout;
        Ok(())
    }
}
