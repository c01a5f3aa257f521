//! Pages of guest memory that vCPUs write.

use std::io;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

use super::Vm;
use super::ram_slot::RamSlot;

// An ioctl of `linux/kvm.h` that the crate lacks.
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);

/// Pages of a word of KVM's log. A call for a part of the log starts at a multiple of it.
const WORD: u64 = u64::BITS as u64;

impl Vm {
    /// The guest's memory, by guest addresses.
    pub fn ram(&self) -> Vec<RamSlot> {
        let mut slots: Vec<_> = self.ram.lock().slots.values().copied().collect();
        slots.sort_unstable_by_key(|slot| slot.guest);
        slots
    }

    /// Turns KVM's dirty log of vCPUs' writes to guest memory on or off. At first all pages count as written, or none
    /// if this kernel cannot start that way; the caller then treats all as written.
    ///
    /// # Errors
    ///
    /// Fails if an ioctl fails. Nothing is logged then.
    pub fn log_writes(&self, logged: bool) -> io::Result<()> {
        if logged {
            self.protect_by_hand()?;
        }
        // Locked: a slot that is removed in the meantime must not come back.
        let mut ram = self.ram.lock();
        let set = |slot: &RamSlot, flags| {
            // SAFETY: the slot is as its creator promised, except for the flag.
            unsafe { self.set_slot(slot.slot, slot.guest, slot.host, slot.len, flags) }
        };
        let flags = if logged { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        let result = ram.slots.values().try_for_each(|slot| set(slot, flags));
        if logged && result.is_err() {
            ram.slots.values().for_each(|slot| drop(set(slot, 0)));
        }
        ram.logged = logged && result.is_ok();
        result
    }

    /// Switches to manual protection, if this kernel supports it: a page is protected again when its bit is cleared,
    /// not when it is read, and logging starts with all bits set, without protecting anything.
    fn protect_by_hand(&self) -> io::Result<()> {
        let known = self.fd.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
        let wanted = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
        let able = u32::try_from(known).unwrap_or(0) & wanted;
        if able & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE == 0 {
            return Ok(());
        }
        let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        self.fd.enable_cap(&kvm_enable_cap { cap, args: [able.into(), 0, 0, 0], ..Default::default() })?;
        *self.by_hand.lock() = true;
        Ok(())
    }

    /// The written pages of `slot`, a bit for each from its start. A bit stays until it is
    /// [cleared](Self::forget_written); without manual protection, it is cleared now. Empty if the slot was removed
    /// because its memory was unplugged.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn written(&self, slot: &RamSlot) -> io::Result<Vec<u64>> {
        let len = usize::try_from(slot.len).map_err(io::Error::other)?;
        let ram = self.ram.lock();
        if !ram.has(slot) {
            return Ok(Vec::new());
        }
        Ok(self.fd.get_dirty_log(slot.slot, len)?)
    }

    /// Clears the log bits set in `pages`, from page `first` of `slot` on, a multiple of 64. Later writes are logged
    /// again. Bits beyond the slot's end are ignored.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn forget_written(&self, slot: &RamSlot, first: u64, pages: &[u64]) -> io::Result<()> {
        if !*self.by_hand.lock() || pages.iter().all(|bits| *bits == 0) {
            return Ok(());
        }
        // Either whole words, or up to the end.
        let left = slot.pages().checked_sub(first).ok_or(io::ErrorKind::InvalidInput)?;
        let count = (pages.len() as u64).saturating_mul(WORD).min(left);
        let mut bits = pages.to_vec();
        let mut clear = kvm_clear_dirty_log {
            slot: slot.slot,
            num_pages: u32::try_from(count).map_err(io::Error::other)?,
            first_page: first,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap: bits.as_mut_ptr().cast() },
        };
        let ram = self.ram.lock();
        if !ram.has(slot) {
            return Ok(());
        }
        // SAFETY: KVM reads one structure of this type, and `num_pages` bits, for which `bits` has room.
        match unsafe { ioctl_with_mut_ref(&self.fd, KVM_CLEAR_DIRTY_LOG(), &mut clear) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
