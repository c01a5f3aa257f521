//! Reading and setting the state of vCPUs, interrupt controllers and the clock, to move a guest.

use std::io;

use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{
    KVM_CAP_SREGS2, KVM_CLOCK_REALTIME, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_SREGS2_FLAGS_PDPTRS_VALID,
    KVM_VCPU_TSC_OFFSET, KVMIO, Msrs, Xsave, kvm_clock_data, kvm_debugregs, kvm_device_attr, kvm_irqchip,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

use super::{Cap, Kvm, KvmError, Vcpu, Vm, failed};

// Ioctls of `linux/kvm.h` that the crate lacks.
ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// The attributes of a vCPU's time stamp counter (`asm/kvm.h`, KVM_VCPU_TSC_CTRL).
const TSC_CTRL: u32 = 0;
/// The time stamp counter as a model-specific register.
const IA32_TSC: u32 = 0x10;
/// The most registers that one call reads or sets, below KVM's limit of 256.
const MSRS_AT_ONCE: usize = 128;

/// Parts of a vCPU's state that this kernel and this CPU have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// The size of a vCPU's XSAVE area in bytes.
    pub xsave: usize,
    /// True if there are extended control registers.
    pub xcrs: bool,
    /// True if the page directory pointers are a part of the system registers.
    pub pdptrs: bool,
    /// True if nested guests have a state.
    pub nested: bool,
    /// True if time stamp counters can have another frequency than the host's.
    pub tsc_scaling: bool,
    /// True if the clock can be set together with its real time.
    pub realtime: bool,
}

/// A model-specific register that KVM refuses.
#[derive(Debug)]
pub struct RefusedMsr {
    /// Index of the register.
    pub index: u32,
    /// The value.
    pub value: u64,
}

impl Kvm {
    /// The model-specific registers that belong to a vCPU's state on this host, in KVM's order.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn msr_indices(&self) -> Result<Vec<u32>, KvmError> {
        let list = self.kvm.get_msr_index_list().map_err(failed("list the model-specific registers"))?;
        Ok(list.as_slice().to_vec())
    }
}

impl Vm {
    /// Parts of a vCPU's state that this host has.
    pub fn abilities(&self) -> Abilities {
        let at_least = size_of::<kvm_xsave>();
        let xsave = usize::try_from(self.fd.check_extension_int(Cap::Xsave2)).unwrap_or(0).max(at_least);
        let clock_flags = u32::try_from(self.fd.check_extension_int(Cap::AdjustClock)).unwrap_or(0);
        Abilities {
            xsave,
            xcrs: self.fd.check_extension(Cap::Xcrs),
            pdptrs: self.fd.check_extension_raw(KVM_CAP_SREGS2.into()) > 0,
            nested: self.fd.check_extension(Cap::NestedState),
            tsc_scaling: self.fd.check_extension(Cap::TscControl),
            realtime: clock_flags & KVM_CLOCK_REALTIME != 0,
        }
    }

    /// An interrupt controller: 0 and 1 are the PICs, 2 is the IOAPIC.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn irqchip(&self, chip_id: u32) -> Result<kvm_irqchip, KvmError> {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        self.fd.get_irqchip(&mut chip).map_err(failed("read the interrupt controllers"))?;
        Ok(chip)
    }

    /// Sets an interrupt controller.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_irqchip(&self, chip: &kvm_irqchip) -> Result<(), KvmError> {
        self.fd.set_irqchip(chip).map_err(failed("set the interrupt controllers"))
    }

    /// Masks all inputs of both PICs. No table describes them, so a guest may never program them; unmasked, they would
    /// interrupt it with the vectors of exceptions. A driver's initialization (ICW1) unmasks them.
    ///
    /// # Errors
    ///
    /// Fails if an ioctl fails.
    pub(super) fn mask_pics(&self) -> Result<(), KvmError> {
        for pic in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
            let mut chip = self.irqchip(pic)?;
            chip.chip.pic.imr = 0xff;
            self.set_irqchip(&chip)?;
        }
        Ok(())
    }

    /// The guests' clock, in nanoseconds, and the host's real time at the same moment, in nanoseconds since 1970, if
    /// the kernel reports it.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn clock(&self) -> Result<(u64, Option<u64>), KvmError> {
        let clock = self.fd.get_clock().map_err(failed("read the clock"))?;
        Ok((clock.clock, (clock.flags & KVM_CLOCK_REALTIME != 0).then_some(clock.realtime)))
    }

    /// Sets the clock to `clock` nanoseconds; with `realtime`, to its value now if it had continued since that real
    /// time. No vCPU may have run.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_clock(&self, clock: u64, realtime: Option<u64>) -> Result<(), KvmError> {
        let flags = if realtime.is_some() { KVM_CLOCK_REALTIME } else { 0 };
        let data = kvm_clock_data { clock, flags, realtime: realtime.unwrap_or(0), ..Default::default() };
        self.fd.set_clock(&data).map_err(failed("set the clock"))
    }
}

impl Vcpu {
    /// State of the vCPU: running, halted or waiting to be started. Pending interrupts may be delivered by this call.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn mp_state(&self) -> Result<u32, KvmError> {
        Ok(self.fd.get_mp_state().map_err(failed("read whether a vCPU runs"))?.mp_state)
    }

    /// Sets the state that [`Self::mp_state`] returns.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, which it does for impossible states.
    pub fn set_mp_state(&self, mp_state: u32) -> Result<(), KvmError> {
        self.fd.set_mp_state(kvm_mp_state { mp_state }).map_err(failed("set whether a vCPU runs"))
    }

    /// The page directory pointers of a vCPU in 32-bit paging with PAE, which are a part of its state.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn pdptrs(&self) -> Result<Option<[u64; 4]>, KvmError> {
        let mut sregs = kvm_sregs2::default();
        // SAFETY: the kernel writes the structure whose size is in the ioctl's number, and nothing beyond.
        let result = unsafe { ioctl_with_mut_ref(&self.fd, KVM_GET_SREGS2(), &mut sregs) };
        checked(result).map_err(failed("read a vCPU's system registers"))?;
        Ok((sregs.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0).then_some(sregs.pdptrs))
    }

    /// Sets the segment and control registers together with the page directory pointers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, which it does for impossible states.
    pub fn set_sregs_with_pdptrs(&self, sregs: &kvm_sregs, pdptrs: [u64; 4]) -> Result<(), KvmError> {
        let kvm_sregs { cs, ds, es, fs, gs, ss, tr, ldt, gdt, idt, cr0, cr2, cr3, cr4, cr8, efer, apic_base, .. } =
            *sregs;
        let flags = KVM_SREGS2_FLAGS_PDPTRS_VALID.into();
        let sregs = kvm_sregs2 {
            cs,
            ds,
            es,
            fs,
            gs,
            ss,
            tr,
            ldt,
            gdt,
            idt,
            cr0,
            cr2,
            cr3,
            cr4,
            cr8,
            efer,
            apic_base,
            flags,
            pdptrs,
        };
        // SAFETY: the kernel reads the structure whose size is in the ioctl's number, and nothing beyond.
        let result = unsafe { ioctl_with_ref(&self.fd, KVM_SET_SREGS2(), &sregs) };
        checked(result).map_err(failed("set a vCPU's system registers"))
    }

    /// The XSAVE area, of `abilities.xsave` bytes: the registers of floating-point and vector units.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn xsave(&self, abilities: &Abilities) -> Result<Vec<u8>, KvmError> {
        let action = "read a vCPU's vector registers";
        let mut xsave = area(abilities).map_err(failed(action))?;
        if has_long_area(abilities) {
            // SAFETY: the area has the length that KVM reports, and the features of guests do not change.
            unsafe { self.fd.get_xsave2(&mut xsave) }.map_err(failed(action))?;
        } else {
            let short = self.fd.get_xsave().map_err(failed(action))?;
            // SAFETY: the length of the rest is not changed.
            unsafe { xsave.as_mut_fam_struct() }.xsave = short;
        }
        let words = xsave.as_fam_struct_ref().xsave.region.iter().chain(xsave.as_slice());
        Ok(words.flat_map(|word| word.to_le_bytes()).collect())
    }

    /// Sets the XSAVE area; bytes that `bytes` lacks are zero.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, or the area is not as long.
    pub fn set_xsave(&self, bytes: &[u8], abilities: &Abilities) -> Result<(), KvmError> {
        let action = "set a vCPU's vector registers";
        let mut xsave = area(abilities).map_err(failed(action))?;
        if bytes.len() > abilities.xsave {
            return Err(failed(action)(io::Error::from(io::ErrorKind::InvalidInput)));
        }
        let mut words = bytes.chunks(4).map(|word| {
            let mut bytes = [0; 4];
            bytes.iter_mut().zip(word).for_each(|(to, from)| *to = *from);
            u32::from_le_bytes(bytes)
        });
        // SAFETY: the length of the rest is not changed.
        let region = unsafe { &mut xsave.as_mut_fam_struct().xsave.region };
        region.iter_mut().zip(words.by_ref()).for_each(|(to, from)| *to = from);
        xsave.as_mut_slice().iter_mut().zip(words).for_each(|(to, from)| *to = from);
        // SAFETY: the area has the length that KVM reports, and the features of guests do not change.
        unsafe { self.fd.set_xsave2(&xsave) }.map_err(failed(action))
    }

    /// The extended control registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn xcrs(&self) -> Result<kvm_xcrs, KvmError> {
        self.fd.get_xcrs().map_err(failed("read a vCPU's extended control registers"))
    }

    /// Sets the extended control registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_xcrs(&self, xcrs: &kvm_xcrs) -> Result<(), KvmError> {
        self.fd.set_xcrs(xcrs).map_err(failed("set a vCPU's extended control registers"))
    }

    /// The debug registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn debug_registers(&self) -> Result<kvm_debugregs, KvmError> {
        self.fd.get_debug_regs().map_err(failed("read a vCPU's debug registers"))
    }

    /// Sets the debug registers.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_debug_registers(&self, registers: &kvm_debugregs) -> Result<(), KvmError> {
        self.fd.set_debug_regs(registers).map_err(failed("set a vCPU's debug registers"))
    }

    /// The local APIC.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn lapic(&self) -> Result<kvm_lapic_state, KvmError> {
        self.fd.get_lapic().map_err(failed("read the state of a vCPU's APIC"))
    }

    /// Sets the local APIC.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_lapic(&self, lapic: &kvm_lapic_state) -> Result<(), KvmError> {
        self.fd.set_lapic(lapic).map_err(failed("set the state of a vCPU's APIC"))
    }

    /// Exceptions and interrupts that are pending or being delivered.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn events(&self) -> Result<kvm_vcpu_events, KvmError> {
        self.fd.get_vcpu_events().map_err(failed("read what a vCPU waits for"))
    }

    /// Sets the state that [`Self::events`] returns.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_events(&self, events: &kvm_vcpu_events) -> Result<(), KvmError> {
        self.fd.set_vcpu_events(events).map_err(failed("set what a vCPU waits for"))
    }

    /// State of the vCPU's nested guests, if it has any.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn nested_state(&self) -> Result<KvmNestedStateBuffer, KvmError> {
        let mut state = KvmNestedStateBuffer::empty();
        self.fd.nested_state(&mut state).map_err(failed("read the state of a guest's guests"))?;
        Ok(state)
    }

    /// Sets the state of the vCPU's nested guests.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_nested_state(&self, state: &KvmNestedStateBuffer) -> Result<(), KvmError> {
        let longest = size_of::<KvmNestedStateBuffer>();
        if usize::try_from(state.size).is_ok_and(|size| size > longest) {
            return Err(failed("set the state of a guest's guests")(io::Error::from(io::ErrorKind::InvalidInput)));
        }
        self.fd.set_nested_state(state).map_err(failed("set the state of a guest's guests"))
    }

    /// The values of the registers in `indices` that this vCPU has, with their indices.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn msrs(&self, indices: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
        let action = "read a vCPU's model-specific registers";
        let mut values = Vec::with_capacity(indices.len());
        let mut rest = indices;
        while !rest.is_empty() {
            let part = rest.get(..MSRS_AT_ONCE).unwrap_or(rest);
            let mut msrs = entries(part.iter().map(|index| (*index, 0))).map_err(failed(action))?;
            let read = self.fd.get_msrs(&mut msrs).map_err(failed(action))?;
            values.extend(msrs.as_slice().iter().take(read).map(|msr| (msr.index, msr.data)));
            // The call ends at the first register that the vCPU lacks; KVM lists those of the host.
            let done = if read < part.len() { read + 1 } else { read };
            rest = rest.get(done..).unwrap_or_default();
        }
        Ok(values)
    }

    /// Sets model-specific registers, in this order. Returns the first that KVM refuses, if any.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_each_msr(&self, msrs: &[(u32, u64)]) -> Result<Option<RefusedMsr>, KvmError> {
        let action = "set a vCPU's model-specific registers";
        for part in msrs.chunks(MSRS_AT_ONCE) {
            let set = self.fd.set_msrs(&entries(part.iter().copied()).map_err(failed(action))?);
            let set = set.map_err(failed(action))?;
            if let Some((index, value)) = part.get(set) {
                return Ok(Some(RefusedMsr { index: *index, value: *value }));
            }
        }
        Ok(None)
    }

    /// The frequency of the time stamp counter, in kHz.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn tsc_khz(&self) -> Result<u32, KvmError> {
        self.fd.get_tsc_khz().map_err(failed("read the frequency of the time stamp counter"))
    }

    /// Sets the frequency of the time stamp counter, in kHz.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<(), KvmError> {
        self.fd.set_tsc_khz(khz).map_err(failed("set the frequency of the time stamp counter"))
    }

    /// The time stamp counter, as the guest would read it now.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn tsc(&self) -> Result<u64, KvmError> {
        let action = "read the time stamp counter";
        let first = self.msrs(&[IA32_TSC])?.first().map(|(_, value)| *value);
        first.ok_or_else(|| failed(action)(io::Error::from(io::ErrorKind::Unsupported)))
    }

    /// Offset of the guest's time stamp counter from the host's, modulo 2^64.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails, which it does before Linux 5.16.
    pub fn tsc_offset(&self) -> Result<u64, KvmError> {
        let mut offset = 0;
        let attribute = tsc_offset(&raw mut offset);
        // SAFETY: the kernel writes the number that the attribute points to, which outlives the call.
        let result = unsafe { ioctl_with_ref(&self.fd, KVM_GET_DEVICE_ATTR(), &attribute) };
        checked(result).map_err(failed("read the offset of the time stamp counter"))?;
        Ok(offset)
    }

    /// Sets the offset that [`Self::tsc_offset`] returns. All vCPUs of a VM should get the same one right after each
    /// other.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn set_tsc_offset(&self, mut offset: u64) -> Result<(), KvmError> {
        let attribute = tsc_offset(&raw mut offset);
        // SAFETY: the kernel reads the number that the attribute points to, which outlives the call.
        let result = unsafe { ioctl_with_ref(&self.fd, KVM_SET_DEVICE_ATTR(), &attribute) };
        checked(result).map_err(failed("set the offset of the time stamp counter"))
    }
}

fn tsc_offset(number: *mut u64) -> kvm_device_attr {
    kvm_device_attr { group: TSC_CTRL, attr: KVM_VCPU_TSC_OFFSET.into(), addr: number as u64, flags: 0 }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// True if the XSAVE area is longer than the fixed structure.
fn has_long_area(abilities: &Abilities) -> bool {
    abilities.xsave > size_of::<kvm_xsave>()
}

/// An XSAVE area of zeros.
fn area(abilities: &Abilities) -> io::Result<Xsave> {
    let more = abilities.xsave.saturating_sub(size_of::<kvm_xsave>()).div_ceil(size_of::<u32>());
    Xsave::new(more).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
}

fn entries(msrs: impl Iterator<Item = (u32, u64)>) -> io::Result<Msrs> {
    let entries: Vec<_> = msrs.map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() }).collect();
    Msrs::from_entries(&entries).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
}
