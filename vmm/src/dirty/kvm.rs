//! Dirty pages of vCPUs.

use std::io;
use std::sync::Arc;

use virtio_devices::PAGE_SIZE;

use super::page_set::{Chunk, PageSet};
use super::source::DirtySource;
use crate::kvm;

/// Memory that one word of page bits covers, in bytes.
const WORD_BYTES: u64 = u64::BITS as u64 * PAGE_SIZE as u64;

/// The vCPUs of a VM, whose writes KVM logs.
pub struct Vcpus {
    vm: Arc<kvm::Vm>,
    /// Memory slots by guest address at the last collection: memory is plugged and unplugged in between.
    slots: Vec<kvm::RamSlot>,
}

impl Vcpus {
    /// Logs the vCPUs of `vm`. A rebooted guest has a new VM.
    pub fn new(vm: Arc<kvm::Vm>) -> Self {
        Self { vm, slots: Vec::new() }
    }
}

impl DirtySource for Vcpus {
    fn name(&self) -> &'static str {
        "vCPUs write"
    }

    fn start(&mut self) -> io::Result<()> {
        self.slots = self.vm.ram();
        self.vm.log_writes(true)
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.slots = self.vm.ram();
        for slot in &self.slots {
            pages.add_region(slot.guest, &self.vm.written(slot)?);
        }
        Ok(())
    }

    fn release(&mut self, chunk: &Chunk) -> io::Result<()> {
        let place = chunk.place();
        let (start, end) = (chunk.region_start + place.start, chunk.region_start + place.end);
        let from = self.slots.partition_point(|slot| slot.guest.saturating_add(slot.len) <= start);
        for slot in self.slots.iter().skip(from).take_while(|slot| slot.guest < end) {
            // Slots and chunks begin at a multiple of 64 pages of their region.
            let (begin, finish) = (slot.guest.max(start), end.min(slot.guest.saturating_add(slot.len)));
            let word = |address: u64| usize::try_from((address - start).div_ceil(WORD_BYTES)).unwrap_or(usize::MAX);
            let words = chunk.words.get(word(begin)..word(finish).min(chunk.words.len())).unwrap_or_default();
            self.vm.forget_written(slot, (begin - slot.guest) / PAGE_SIZE as u64, words)?;
        }
        Ok(())
    }

    fn stop(&mut self) {
        if let Err(error) = self.vm.log_writes(false) {
            // The guest is slower until its next reset.
            log::warn!("KVM continues to log what the guest writes: {error}");
        }
    }
}
