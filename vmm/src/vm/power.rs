//! Creates the KVM VM and its vCPUs, and wires them.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::layout;
use crate::arch::x86_64::regs::{self, Entry};
use crate::kvm::{self, KvmError, Vcpu};
use crate::pci_host::memory_slots::plugged;
use crate::serial::{SerialConsole, SerialPort};
use crate::vm::powered::Powered;
use crate::vm::{Vm, VmError, plug_slots};

/// Time limit for the end of the VM before a reset.
const PATIENCE: Duration = Duration::from_secs(10);

impl Vm {
    /// The serial port, if there is one.
    pub fn serial(&self) -> Option<&Arc<SerialPort>> {
        self.serial.as_ref().map(SerialConsole::port)
    }

    /// Options that show the guest's output. Firmware has no kernel command line.
    pub(super) fn way_to_output(&self) -> &'static str {
        if self.payload_config.firmware.is_some() {
            "--serial tty --console off"
        } else {
            "--serial tty --cmdline \"console=ttyS0 earlyprintk=ttyS0\""
        }
    }

    /// The vCPUs of `vm`. The first starts at `entry`, the others when it wakes them.
    pub(super) fn vcpus(&self, vm: &kvm::Vm, entry: Entry) -> Result<Vec<Vcpu>, VmError> {
        (0..u32::from(self.vcpus))
            .map(|id| {
                let vcpu = self.vcpu(vm, id)?;
                if id == 0 {
                    let mut sregs = vcpu.sregs()?;
                    entry.set_sregs(&mut sregs);
                    vcpu.set_sregs(&sregs)?;
                    vcpu.set_regs(&entry.regs())?;
                }
                Ok(vcpu)
            })
            .collect()
    }

    /// vCPU `id` of `vm`, in its power-on state.
    pub(super) fn vcpu(&self, vm: &kvm::Vm, id: u32) -> Result<Vcpu, VmError> {
        let msrs = regs::msrs().ok_or(KvmError::Capability("room for two MSRs"))?;
        let vcpu = self.bare_vcpu(vm, id)?;
        vcpu.set_msrs(&msrs)?;
        Ok(vcpu)
    }

    /// vCPU `id` of `vm`, as KVM has it at power-on, with its CPUID.
    pub(super) fn bare_vcpu(&self, vm: &kvm::Vm, id: u32) -> Result<Vcpu, VmError> {
        let vcpu = vm.create_vcpu(self.cpuid.apic_id(id))?;
        let cpuid = self.cpuid.vcpu(id).ok_or(KvmError::Capability("room for its own CPUID leaves"))?;
        vcpu.set_cpuid(&cpuid)?;
        if self.cpus.kvm_hyperv {
            vcpu.enable_synic()?;
        }
        Ok(vcpu)
    }

    /// Creates a KVM VM with the guest's memory and devices.
    pub(super) fn power(&self) -> Result<Powered, VmError> {
        let powered = self.connect(self.kvm_vm()?)?;
        self.devices.attach(Arc::clone(&powered.vm), self.is_firmware)?;
        Ok(powered)
    }

    /// Creates a KVM VM with the guest's memory.
    pub(super) fn kvm_vm(&self) -> Result<Arc<kvm::Vm>, VmError> {
        let vm = Arc::new(self.kvm.create_vm(layout::KVM_TSS)?);
        let memory = self.ram.memory().memory();
        let of_devices: Vec<_> = self.mem_regions.all().map(|region| region.start()).collect();
        for (slot, region) in (0..).zip(memory.iter()) {
            if of_devices.contains(&region.start_addr().0) {
                continue;
            }
            // SAFETY: the region is a mapping of guest memory, to which no references are made; `self` keeps it mapped
            // for longer than this VM and its vCPUs live.
            unsafe { vm.set_memory(slot, region.start_addr().0, region.as_ptr(), region.len())? };
        }
        plug_slots::attach(&vm, &memory, &self.mem_regions, plugged(self.kvm.memory_slots()))?;
        Ok(vm)
    }

    /// Wires the parts that are not devices in slots to `vm`. Dropping the result removes all wires.
    pub(super) fn connect(&self, vm: Arc<kvm::Vm>) -> Result<Powered, VmError> {
        let serial = self.serial().map(Arc::clone);
        let wire =
            |what, eventfd, gsi| attach(&vm, eventfd, gsi).map_err(|error| KvmError::Ioctl { action: what, error });
        wire("wire the event device's interrupt", self.ged.interrupt(), layout::EVENT_GSI)?;
        if let Some(serial) = &serial {
            wire("wire the serial port's interrupt", serial.interrupt(), layout::SERIAL_GSI)?;
        }
        // From here on, dropping the result detaches the devices, even if attaching fails.
        let (bus, vfio) = (Arc::clone(self.devices.bus()), Arc::clone(self.devices.vfio()));
        Ok(Powered { vm, bus, vfio, serial, ged: Arc::clone(&self.ged) })
    }
}

/// As [`kvm::Vm::attach_irqfd`], for an eventfd that the VM before a reset may still have.
///
/// The earlier VM ends with its last descriptor, and a program that is just being started has one until its `execve`.
/// Since Linux 6.17, KVM refuses an eventfd that two VMs would have.
fn attach(vm: &kvm::Vm, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match vm.attach_irqfd(eventfd, gsi) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::kvm::Kvm;

    #[test]
    fn an_eventfd_waits_for_the_end_of_the_vm_before() {
        let kvm = Kvm::open().unwrap();
        let [before, after] = [(); 2].map(|()| kvm.create_vm(layout::KVM_TSS).unwrap());
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        attach(&before, &eventfd, layout::EVENT_GSI).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                drop(before);
            });
            attach(&after, &eventfd, layout::EVENT_GSI).unwrap();
        });
    }
}
