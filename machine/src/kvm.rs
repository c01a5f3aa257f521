//! KVM: the only file that names kvm-ioctls.
//!
//! A thin layer over `/dev/kvm`: the calls that the VMM needs, and errors with remedies.

mod dirty_log;
mod error;
mod hypercall;
mod hyperv;
mod ram_slot;
mod routes;
mod state;
mod vfio_files;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_CAP_EXT_CPUID, KVM_CAP_IMMEDIATE_EXIT, KVM_CAP_IOEVENTFD, KVM_CAP_IOEVENTFD_ANY_LENGTH,
    KVM_CAP_IRQ_ROUTING, KVM_CAP_IRQCHIP, KVM_CAP_IRQFD, KVM_CAP_USER_MEMORY, KVM_MAX_CPUID_ENTRIES,
    KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_mp_state, kvm_regs, kvm_run,
    kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use parking_lot::Mutex;
use virtio_devices::{DOORBELL_PAGE, DoorbellPage, FileMapping};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::error::API_VERSION;
pub use crate::kvm::error::KvmError;
pub use crate::kvm::ram_slot::RamSlot;
use crate::kvm::ram_slot::RamSlots;
pub use crate::kvm::routes::{IOAPIC_PINS, MsiRoute};
pub use crate::kvm::state::{Abilities, RefusedMsr};
pub use crate::kvm::vfio_files::VfioFiles;

/// Required capabilities. Linux 5.4 has all of them.
const CAPABILITIES: [(u32, &str); 8] = [
    (KVM_CAP_USER_MEMORY, "KVM_CAP_USER_MEMORY"),
    (KVM_CAP_IRQCHIP, "KVM_CAP_IRQCHIP"),
    (KVM_CAP_IRQ_ROUTING, "KVM_CAP_IRQ_ROUTING"),
    (KVM_CAP_IRQFD, "KVM_CAP_IRQFD"),
    (KVM_CAP_IOEVENTFD, "KVM_CAP_IOEVENTFD"),
    (KVM_CAP_IOEVENTFD_ANY_LENGTH, "KVM_CAP_IOEVENTFD_ANY_LENGTH"),
    (KVM_CAP_IMMEDIATE_EXIT, "KVM_CAP_IMMEDIATE_EXIT"),
    (KVM_CAP_EXT_CPUID, "KVM_CAP_EXT_CPUID"),
];

fn failed<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> KvmError {
    move |error| KvmError::Ioctl { action, error: error.into() }
}

/// The host's KVM.
#[derive(Debug)]
pub struct Kvm {
    kvm: kvm_ioctls::Kvm,
}

impl Kvm {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be opened, or lacks a required capability.
    pub fn open() -> Result<Self, KvmError> {
        let kvm = kvm_ioctls::Kvm::new().map_err(|error| match io::Error::from(error) {
            error if error.kind() == io::ErrorKind::NotFound => KvmError::Absent,
            error if error.kind() == io::ErrorKind::PermissionDenied => KvmError::Permission,
            // The device node exists without a driver.
            error if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => KvmError::Absent,
            error => KvmError::Open(error),
        })?;
        let version = kvm.get_api_version();
        if version != API_VERSION {
            return Err(KvmError::Version(version));
        }
        match CAPABILITIES.iter().find(|(capability, _)| kvm.check_extension_raw((*capability).into()) <= 0) {
            Some((_, name)) => Err(KvmError::Capability(name)),
            None => Ok(Self { kvm }),
        }
    }

    /// The largest number of vCPUs of one VM.
    pub fn max_vcpus(&self) -> u32 {
        u32::try_from(self.kvm.get_max_vcpus()).unwrap_or(u32::MAX)
    }

    /// The number of memory slots of one VM.
    pub fn memory_slots(&self) -> u32 {
        u32::try_from(self.kvm.get_nr_memslots()).unwrap_or(u32::MAX)
    }

    /// The CPUID leaves that KVM can offer a guest on this host.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed("read the supported CPUID"))
    }

    /// True if the local APIC's timer has TSC-deadline mode, which the supported CPUID does not report.
    pub fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Creates a VM without memory or vCPUs, with the local APICs and the IOAPIC inside the kernel. KVM also creates
    /// the PICs, which are masked here.
    ///
    /// At `tss`, KVM puts three pages of its own on Intel hosts, at guest addresses that are neither memory nor a
    /// device; the identity map's page follows them.
    ///
    /// # Errors
    ///
    /// Fails if an ioctl fails.
    pub fn create_vm(&self, tss: u32) -> Result<Vm, KvmError> {
        // The call fails if a signal arrives in the meantime, such as SIGWINCH.
        let fd = loop {
            match self.kvm.create_vm() {
                Err(error) if error.errno() == libc::EINTR => {}
                made => break made.map_err(failed("create a VM"))?,
            }
        };
        fd.set_identity_map_address(u64::from(tss) + 3 * 4096).map_err(failed("place the identity map"))?;
        fd.set_tss_address(tss as usize).map_err(failed("place the TSS"))?;
        fd.create_irq_chip().map_err(failed("create the interrupt controllers"))?;
        let msi_device_ids = fd.check_extension(Cap::MsiDevid);
        let vm = Vm {
            fd,
            msi_device_ids,
            read_only: Mutex::default(),
            doorbells: Mutex::default(),
            memory: Mutex::default(),
            ram: Mutex::default(),
            by_hand: Mutex::default(),
        };
        vm.mask_pics()?;
        Ok(vm)
    }
}

/// A KVM virtual machine.
#[derive(Debug)]
pub struct Vm {
    fd: VmFd,
    msi_device_ids: bool,
    /// The memory behind read-only memory slots, kept mapped. Declared after `fd`, which is dropped first.
    read_only: Mutex<BTreeMap<u32, Arc<MmapRegion>>>,
    /// The doorbell pages behind memory slots; likewise.
    doorbells: Mutex<BTreeMap<u32, Arc<DoorbellPage>>>,
    /// The memory of devices behind memory slots; likewise.
    memory: Mutex<BTreeMap<u32, Arc<FileMapping>>>,
    /// The memory slots with the guest's memory. Locked while one changes.
    ram: Mutex<RamSlots>,
    /// True if a written page is protected again only when its log bit is cleared.
    by_hand: Mutex<bool>,
}

impl Vm {
    /// Creates vCPU `id`, whose local APIC has the same ID.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn create_vcpu(&self, id: u32) -> Result<Vcpu, KvmError> {
        let fd = self.fd.create_vcpu(u64::from(id)).map_err(failed("create a vCPU"))?;
        // KVM finds the receiver of an interrupt in a map, which it rebuilds when an APIC changes, but not with the
        // vCPU that it is just creating. A vCPU added to a running guest would never get the INIT that wakes it.
        let state = fd.get_lapic().map_err(failed("read the state of a vCPU's APIC"))?;
        fd.set_lapic(&state).map_err(failed("set the state of a vCPU's APIC"))?;
        Ok(Vcpu { fd })
    }

    /// KVM's VFIO device, which tracks the groups and devices assigned to the guest. Keeps the VM alive.
    ///
    /// # Errors
    ///
    /// Fails if KVM was built without VFIO, or no file descriptor is left.
    pub fn vfio_files(&self) -> Result<VfioFiles, KvmError> {
        let mut device = VfioFiles::device();
        let fd = self.fd.create_device(&mut device).map_err(failed("make KVM's VFIO device"))?;
        Ok(VfioFiles::new(Box::new(move |attribute| fd.set_device_attr(attribute).map_err(Into::into))))
    }

    /// Backs `len` bytes of guest addresses from `guest` with the host's memory at `host`. A `len` of 0 removes the
    /// memory slot.
    ///
    /// # Safety
    ///
    /// `host` must be a mapping of at least `len` bytes without a Rust reference in this process, and it must stay
    /// mapped until the slot is removed or the VM and its vCPUs are dropped.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub unsafe fn set_memory(&self, slot: u32, guest: u64, host: *mut u8, len: u64) -> Result<(), KvmError> {
        let mut ram = self.ram.lock();
        let flags = if ram.logged && len > 0 { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        // SAFETY: the caller upholds this function's contract, which is that of the call.
        unsafe { self.set_slot(slot, guest, host as u64, len, flags) }.map_err(failed("give the VM its memory"))?;
        match len {
            0 => ram.slots.remove(&slot),
            _ => ram.slots.insert(slot, RamSlot { slot, guest, host: host as u64, len }),
        };
        Ok(())
    }

    /// True if the slot has memory of the guest.
    pub fn has_memory(&self, slot: u32) -> bool {
        self.ram.lock().slots.contains_key(&slot)
    }

    /// Shows the bytes in `range` of `memory` at the guest address `guest`, as memory that the guest can read and whose
    /// writes exit. Replaces the former content of `slot`; without `memory`, hides that.
    ///
    /// # Errors
    ///
    /// Fails if `memory` is too short, KVM does not support read-only memory, or the ioctl fails. `slot` then shows
    /// nothing.
    pub fn set_read_only(
        &self,
        slot: u32,
        guest: u64,
        memory: Option<(&Arc<MmapRegion>, Range<u64>)>,
    ) -> io::Result<()> {
        let mut read_only = self.read_only.lock();
        if read_only.contains_key(&slot) {
            // SAFETY: a slot without memory refers to none.
            unsafe { self.set_slot(slot, guest, 0, 0, KVM_MEM_READONLY)? };
            read_only.remove(&slot);
        }
        if let Some((memory, Range { start, end })) = memory {
            let len = end.checked_sub(start).filter(|_| end <= memory.size() as u64);
            let len = len.ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: the mapping has these bytes, gives out no references to them, and lives in `read_only` until the
            // slot is removed or the VM is dropped.
            unsafe { self.set_slot(slot, guest, memory.as_ptr() as u64 + start, len, KVM_MEM_READONLY)? };
            read_only.insert(slot, Arc::clone(memory));
        }
        Ok(())
    }

    /// Shows `page` at a guest address, as memory that the guest can write to, and hides the former content of `slot`.
    ///
    /// # Errors
    ///
    /// Fails if another slot is at that address, or the ioctl fails. The former content of `slot` may be hidden then.
    pub fn set_doorbell_page(&self, slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()> {
        let mut doorbells = self.doorbells.lock();
        if doorbells.contains_key(&slot) {
            // SAFETY: a slot without memory refers to none.
            unsafe { self.set_slot(slot, 0, 0, 0, 0)? };
            doorbells.remove(&slot);
        }
        if let Some((guest, page)) = page {
            // SAFETY: the mapping has a page, gives out no references to it, and lives in `doorbells` until the slot is
            // removed or the VM is dropped.
            unsafe { self.set_slot(slot, guest, page.address() as u64, DOORBELL_PAGE, 0)? };
            doorbells.insert(slot, Arc::clone(page));
        }
        Ok(())
    }

    /// Shows `memory` at a guest address, as memory that the guest can read and write, and hides the former content of
    /// `slot`.
    ///
    /// # Errors
    ///
    /// Fails if another slot is at that address, or the ioctl fails. The former content of `slot` may be hidden then.
    pub fn set_device_memory(&self, slot: u32, memory: Option<(u64, &Arc<FileMapping>)>) -> io::Result<()> {
        let mut shown = self.memory.lock();
        if shown.contains_key(&slot) {
            // SAFETY: a slot without memory refers to none.
            unsafe { self.set_slot(slot, 0, 0, 0, 0)? };
            shown.remove(&slot);
        }
        if let Some((guest, memory)) = memory {
            // SAFETY: the mapping has this length, it gives out no references, and it lives in `memory` until the slot
            // is removed or the VM is dropped.
            unsafe { self.set_slot(slot, guest, memory.address() as u64, memory.len(), 0)? };
            shown.insert(slot, Arc::clone(memory));
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As [`Self::set_memory`].
    unsafe fn set_slot(&self, slot: u32, guest: u64, host: u64, len: u64, flags: u32) -> io::Result<()> {
        let region =
            kvm_userspace_memory_region { slot, flags, guest_phys_addr: guest, memory_size: len, userspace_addr: host };
        // SAFETY: the caller upholds this function's contract, which is that of the call.
        Ok(unsafe { self.fd.set_user_memory_region(region) }?)
    }

    /// Replaces the whole interrupt routing table: the pins of the PICs and of the IOAPIC, and `msi`.
    ///
    /// # Errors
    ///
    /// Fails if there are more routes than KVM can hold (4,096), or the ioctl fails. The old table then stays in force.
    pub fn set_irq_routes(&self, msi: &[MsiRoute]) -> io::Result<()> {
        let table = routes::table(msi, self.msi_device_ids)?;
        Ok(self.fd.set_gsi_routing(&table)?)
    }

    /// Turns signals on `fd` into interrupts on `gsi`, including one that is already pending.
    ///
    /// # Errors
    ///
    /// Fails if `fd` is attached already, or the ioctl fails.
    pub fn attach_irqfd(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.fd.register_irqfd(fd, gsi)?)
    }

    /// Makes signals on `trigger` assert the level-triggered `gsi`, including one that is already pending, until the
    /// guest ends the interrupt, which deasserts it and signals `resample`. Several may assert one GSI; the `resample`
    /// of each is signalled then.
    ///
    /// # Errors
    ///
    /// Fails if `trigger` is attached already, or the ioctl fails.
    pub fn attach_pin(&self, trigger: &EventFd, resample: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.fd.register_irqfd_with_resample(trigger, resample, gsi)?)
    }

    /// Undoes [`Self::attach_irqfd`] or [`Self::attach_pin`]. A later signal stays in `fd`. A level-triggered GSI is
    /// deasserted if no other eventfd can assert it.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn detach_irqfd(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.fd.unregister_irqfd(fd, gsi)?)
    }

    /// Turns a guest's write to `address`, of any length and value, into a signal on `fd` instead of an exit.
    ///
    /// # Errors
    ///
    /// Fails if `address` is taken already, or the ioctl fails.
    pub fn attach_ioeventfd(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.fd.register_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    /// Undoes [`Self::attach_ioeventfd`].
    ///
    /// # Errors
    ///
    /// Fails if `fd` was not attached, or the ioctl fails.
    pub fn detach_ioeventfd(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.fd.unregister_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }
}

/// Reason why a vCPU left the guest.
#[derive(Debug)]
pub enum Exit<'a> {
    /// A read of guest addresses that are not memory.
    MmioRead(u64, &'a mut [u8]),
    /// A write to guest addresses that are not memory.
    MmioWrite(u64, &'a [u8]),
    /// Reads of an I/O port; the first number is the length of each in bytes.
    PioRead(u16, usize, &'a mut [u8]),
    /// Writes to an I/O port; the first number is the length of each in bytes.
    PioWrite(u16, usize, &'a [u8]),
    /// The vCPU was kicked, or a signal arrived.
    Interrupted,
    /// A triple fault.
    Shutdown,
    /// KVM could not continue, for example at an instruction that it cannot emulate. The number is KVM's suberror.
    InternalError(u32),
    /// The hardware refused to enter the guest, with this reason.
    FailedEntry(u64),
    /// An exit of Hyper-V's interface, which is answered already.
    HyperV,
    /// Another exit, by KVM's number.
    Other(u32),
}

/// A virtual CPU.
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
}

/// An exit without the data that are read once nothing borrows the vCPU.
enum Cause {
    PioRead(u16, NonNull<[u8]>),
    PioWrite(u16, NonNull<[u8]>),
    Mmio,
    Interrupted,
    Shutdown,
    InternalError,
    FailedEntry(u64),
    HyperV,
    Other,
}

impl Vcpu {
    /// Sets the results of the CPUID instruction.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_cpuid(&self, cpuid: &CpuId) -> Result<(), KvmError> {
        self.fd.set_cpuid2(cpuid).map_err(failed("set a vCPU's CPUID"))
    }

    /// Sets model-specific registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, or KVM does not accept all of them.
    pub fn set_msrs(&self, msrs: &Msrs) -> Result<(), KvmError> {
        let action = "set a vCPU's MSRs";
        match self.fd.set_msrs(msrs).map_err(failed(action))? {
            set if set == msrs.as_slice().len() => Ok(()),
            set => {
                let index = msrs.as_slice().get(set).map_or(0, |msr| msr.index);
                Err(failed(action)(io::Error::other(format!("MSR {index:#x} is refused"))))
            }
        }
    }

    /// The general registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn regs(&self) -> Result<kvm_regs, KvmError> {
        self.fd.get_regs().map_err(failed("read a vCPU's registers"))
    }

    /// Sets the general registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<(), KvmError> {
        self.fd.set_regs(regs).map_err(failed("set a vCPU's registers"))
    }

    /// The segment and control registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn sregs(&self) -> Result<kvm_sregs, KvmError> {
        self.fd.get_sregs().map_err(failed("read a vCPU's system registers"))
    }

    /// Sets the segment and control registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, which it does for impossible states.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), KvmError> {
        self.fd.set_sregs(sregs).map_err(failed("set a vCPU's system registers"))
    }

    /// Makes the vCPU wait for INIT and a start-up message, as all but the first do at power-on.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn await_startup(&self) -> Result<(), KvmError> {
        let waiting = kvm_mp_state { mp_state: KVM_MP_STATE_UNINITIALIZED };
        self.fd.set_mp_state(waiting).map_err(failed("stop a vCPU"))
    }

    /// Makes the next [`Self::run`] complete the access of the last exit without running the guest. It exits as
    /// interrupted, or for another access of the same instruction.
    pub fn stay_out(&mut self) {
        self.fd.get_kvm_run().immediate_exit = 1;
    }

    /// Notifies the guest that it was paused, so that its watchdogs do not report a vCPU as hung. Its clocks kept
    /// running. A guest that does not use kvmclock cannot be notified.
    pub fn tell_pause(&self) {
        let _ = self.fd.kvmclock_ctrl();
    }

    /// Sends the guest a non-maskable interrupt.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn nmi(&self) -> Result<(), KvmError> {
        self.fd.nmi().map_err(failed("give a vCPU a non-maskable interrupt"))
    }

    /// Flag that makes the next [`Self::run`] return at once if it is 1, even if a signal handler of the vCPU's thread
    /// sets it. Valid as long as the vCPU.
    pub fn immediate_exit(&mut self) -> *mut u8 {
        &raw mut self.fd.get_kvm_run().immediate_exit
    }

    /// Runs the guest until it exits. The caller fills in the data of a read before the next run.
    ///
    /// # Errors
    ///
    /// Fails if KVM cannot run the vCPU.
    pub fn run(&mut self) -> Result<Exit<'_>, KvmError> {
        let cause = match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => Cause::PioRead(port, NonNull::from(data)),
            Ok(VcpuExit::IoOut(port, data)) => Cause::PioWrite(port, NonNull::from(data)),
            Ok(VcpuExit::MmioRead(..) | VcpuExit::MmioWrite(..)) => Cause::Mmio,
            Ok(VcpuExit::Intr) => Cause::Interrupted,
            Ok(VcpuExit::Shutdown) => Cause::Shutdown,
            Ok(VcpuExit::InternalError) => Cause::InternalError,
            Ok(VcpuExit::FailEntry(reason, _)) => Cause::FailedEntry(reason),
            Ok(VcpuExit::Hyperv) => Cause::HyperV,
            Ok(_) => Cause::Other,
            Err(error) => match io::Error::from(error) {
                error if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => Cause::Interrupted,
                error => return Err(failed("run a vCPU")(error)),
            },
        };
        let run = self.fd.get_kvm_run();
        Ok(match cause {
            // SAFETY: the data are those of this exit, in the vCPU's pages after `kvm_run`, which are mapped as long as
            // the vCPU. KVM accesses them only in the next run, which borrows the vCPU mutably, as the returned exit
            // does.
            Cause::PioRead(port, mut data) => Exit::PioRead(port, item_size(run), unsafe { data.as_mut() }),
            // SAFETY: as above.
            Cause::PioWrite(port, data) => Exit::PioWrite(port, item_size(run), unsafe { data.as_ref() }),
            Cause::Mmio => mmio(run),
            Cause::Interrupted => {
                run.immediate_exit = 0;
                Exit::Interrupted
            }
            Cause::Shutdown => Exit::Shutdown,
            // SAFETY: the exit's reason guarantees that KVM has filled in this member.
            Cause::InternalError => Exit::InternalError(unsafe { run.__bindgen_anon_1.internal.suberror }),
            Cause::FailedEntry(reason) => Exit::FailedEntry(reason),
            Cause::HyperV => {
                hypercall::answer(run);
                Exit::HyperV
            }
            Cause::Other => Exit::Other(run.exit_reason),
        })
    }
}

/// The length of each item of an exit that accesses an I/O port, in bytes.
fn item_size(run: &kvm_run) -> usize {
    // SAFETY: any bytes are valid for this member, which KVM has filled in.
    usize::from(unsafe { run.__bindgen_anon_1.io.size })
}

/// The exit that KVM has described in the `mmio` member.
fn mmio(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: the exit's reason guarantees that KVM has filled in this member; any bytes are valid for it.
    let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
    let len = mmio.data.len().min(mmio.len as usize);
    let (data, _) = mmio.data.split_at_mut(len);
    if mmio.is_write == 0 { Exit::MmioRead(mmio.phys_addr, data) } else { Exit::MmioWrite(mmio.phys_addr, data) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Vm>();
    }
}
