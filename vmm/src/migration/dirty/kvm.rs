//! What vCPUs write.

use std::io;
use std::sync::Arc;

use super::page_set::{Chunk, PageSet};
use super::source::DirtySource;
use crate::kvm;

/// The vCPUs of a VM, whose writes KVM logs.
pub struct Vcpus {
    vm: Arc<kvm::Vm>,
    slots: Vec<kvm::RamSlot>,
}

impl Vcpus {
    /// Those of `vm`. A guest that reboots gets another.
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
        for slot in &self.slots {
            pages.add_region(slot.guest, &self.vm.written(slot)?);
        }
        Ok(())
    }

    fn release(&mut self, chunk: &Chunk) -> io::Result<()> {
        match self.slots.iter().find(|slot| slot.guest == chunk.region_start) {
            Some(slot) => self.vm.forget_written(slot, chunk.first, &chunk.words),
            None => Ok(()),
        }
    }

    fn stop(&mut self) {
        if let Err(error) = self.vm.log_writes(false) {
            // The guest is slower until it is reset.
            log::warn!("KVM goes on logging what the guest writes: {error}");
        }
    }
}
