//! Saved state: plain data with a version, untrusted when restored.
//!
//! It holds the registers that differ from their values after a reset, and what the NIC has besides them. A register
//! that software writes is restored through its mask; a value that does not survive is refused. So any input results in
//! a state that a guest could have made. What the configuration determines is not in it: the flash, the permanent
//! address, and the number of VFs that exist.

use crate::descriptor::Context;
use crate::flow::RuleState;
use crate::interrupts::Interrupts;
use crate::mac::Mac;
use crate::mailbox::Mailbox;
use crate::map::{self, rows};
use crate::model::Model;
use crate::nic::Nic;
use crate::phy::Phy;
use crate::registers::Registers;
use crate::spec::{self, vf};
use crate::vectors::Vectors;
use crate::vf::{VECTORS, Vf};

/// The version of the states that this crate saves.
const VERSION: u16 = 1;

/// Reason why a state cannot be restored. The NIC is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// This crate does not support the version of the state.
    #[error("saved state of version {0} of a NIC; this is version {VERSION}")]
    Version(u16),
    /// The state is that of another product.
    #[error("saved state of an {0}; this NIC is an {1}")]
    Model(Model, Model),
    /// The state has another number of elements.
    #[error("saved state of a NIC with another number of {0}")]
    Count(&'static str),
    /// The state holds a value that a guest could not have caused.
    #[error("saved state of a NIC with an impossible value in {0}")]
    Value(&'static str),
}

/// Interrupt state of a function: causes, enabled vectors, auto-clear and auto-mask, a bit per vector.
pub type VectorsState = [u64; 4];

/// A VF.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct VfState {
    /// The mailbox.
    pub mailbox: Mailbox,
    /// The interrupts.
    pub vectors: VectorsState,
    /// VTIVAR, and VTIVAR_MISC as the last one.
    pub allocation: [u32; 5],
    /// VTEITR.
    pub throttle: [u32; 3],
}

/// A NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct NicState {
    /// Version of the state.
    pub version: u16,
    /// The product.
    pub model: Model,
    /// Offsets and values of registers, in ascending order.
    pub registers: Vec<(u32, u32)>,
    /// The interrupts of the PF's queues.
    pub vectors: VectorsState,
    /// Other causes of the PF: EICR, EIMS, EIAC, EIAM.
    pub other: [u32; 4],
    /// The VFs, existing or not.
    pub vfs: Vec<VfState>,
    /// The PHY.
    pub phy: Phy,
    /// The firmware's buffer, up to its last dword that is not 0.
    pub firmware: Vec<u32>,
    /// HICR.SV.
    pub firmware_status: bool,
    /// SWSM.
    pub semaphore: u32,
    /// True from a reset of the PF until PFRSTD.
    pub in_reset: bool,
    /// Queues that have a rate or a QDE: queue, RTTBCNRC, QDE.
    pub queues: Vec<(u16, u32, u32)>,
    /// Contexts of transmit queues: the queue and the context, unless that is all zeros.
    pub contexts: Vec<(u16, Context)>,
    /// Flow rules, in ascending order.
    pub rules: Vec<RuleState>,
}

impl From<Vectors> for VectorsState {
    fn from(vectors: Vectors) -> Self {
        let Vectors { cause, enabled, auto_clear, auto_mask } = vectors;
        [cause, enabled, auto_clear, auto_mask]
    }
}

/// The vectors of a state whose bits are among `mask`.
fn vectors(state: VectorsState, mask: u64) -> Result<Vectors, RestoreError> {
    if state.iter().any(|bits| bits & !mask != 0) {
        return Err(RestoreError::Value("interrupts"));
    }
    let [cause, enabled, auto_clear, auto_mask] = state;
    Ok(Vectors { cause, enabled, auto_clear, auto_mask })
}

impl Nic {
    /// The state that a guest can change.
    pub fn save(&self) -> NicState {
        let reset = Registers::new(self.mac);
        let offsets = rows().flat_map(|row| (0..row.count).map(|n| row.first + n * row.stride));
        let values = offsets.map(|offset| (offset, self.registers.get(offset)));
        let mut registers: Vec<_> = values.filter(|(offset, value)| reset.get(*offset) != *value).collect();
        registers.sort_unstable();
        let Interrupts { vectors, other, other_enabled, other_auto_clear, other_auto_mask } = self.interrupts;
        let used = self.firmware.buffer.iter().rposition(|dword| *dword != 0).map_or(0, |last| last + 1);
        let queues = (0..).zip(self.rates.iter().zip(&self.drops));
        let contexts = (0..).zip(self.contexts.iter()).flat_map(|(queue, two)| two.map(|context| (queue, context)));
        NicState {
            version: VERSION,
            model: self.model,
            registers,
            vectors: vectors.into(),
            other: [other, other_enabled, other_auto_clear, other_auto_mask],
            vfs: self.vfs.iter().map(Vf::save).collect(),
            phy: self.phy.clone(),
            firmware: self.firmware.buffer.iter().take(used).copied().collect(),
            firmware_status: self.firmware.status_valid,
            semaphore: self.semaphore,
            in_reset: self.in_reset,
            queues: queues.map(|(n, (rate, drop))| (n, *rate, *drop)).filter(|q| (q.1, q.2) != (0, 0)).collect(),
            contexts: contexts.filter(|(_, context)| *context != Context::default()).collect(),
            rules: self.flow_table.save(),
        }
    }

    /// Sets the state to `state`. The number of VFs that exist stays.
    ///
    /// # Errors
    ///
    /// Fails if no guest could have caused the state. The NIC is unchanged then.
    pub fn restore(&mut self, state: &NicState) -> Result<(), RestoreError> {
        if state.version != VERSION {
            return Err(RestoreError::Version(state.version));
        }
        if state.model != self.model {
            return Err(RestoreError::Model(state.model, self.model));
        }
        let mut new = Self { num_vfs: self.num_vfs, ..Self::with_model(self.model, self.mac) };
        new.registers = restore_registers(self.model, self.mac, &state.registers)?;
        new.restore_flows(&state.rules).ok_or(RestoreError::Value("flow rules"))?;
        let [other, other_enabled, other_auto_clear, other_auto_mask] = state.other;
        let vectors = vectors(state.vectors, u64::MAX)?;
        new.interrupts = Interrupts { vectors, other, other_enabled, other_auto_clear, other_auto_mask };
        if state.vfs.len() != new.vfs.len() {
            return Err(RestoreError::Count("VFs"));
        }
        for (vf, state) in new.vfs.iter_mut().zip(&state.vfs) {
            vf.restore(state)?;
        }
        new.phy = state.phy.clone();
        if state.firmware.len() > new.firmware.buffer.len() {
            return Err(RestoreError::Count("dwords of the firmware's buffer"));
        }
        new.firmware.buffer.iter_mut().zip(&state.firmware).for_each(|(to, from)| *to = *from);
        new.firmware.status_valid = state.firmware_status;
        new.semaphore = state.semaphore & 3;
        new.in_reset = state.in_reset;
        for (queue, rate, drop) in &state.queues {
            let slots = new.rates.get_mut(usize::from(*queue)).zip(new.drops.get_mut(usize::from(*queue)));
            let (to_rate, to_drop) = slots.ok_or(RestoreError::Value("queues"))?;
            (*to_rate, *to_drop) = (rate & 0x80ff_ffff, drop & 3);
        }
        for (queue, context) in &state.contexts {
            let Context { index, mac_len, ip_len, l4_type, .. } = *context;
            if index > 7 || mac_len > 127 || ip_len > 511 || l4_type > 3 {
                return Err(RestoreError::Value("contexts"));
            }
            new.set_context(*queue, *context);
        }
        // All causes but those of queues, auto-clear of upper vectors, and the command bit of MSCA.
        let is_valid = state.other.iter().all(|bits| bits & 0x8000_ffff == 0)
            && state.vectors.get(2).is_some_and(|auto_clear| auto_clear | 0xffff == u64::MAX)
            && state.phy.command & 1 << 30 == 0;
        if !is_valid || new.save() != *state {
            return Err(RestoreError::Value("registers"));
        }
        // Messages that wait for an interval are sent before a NIC is saved.
        std::mem::swap(&mut new.timers, &mut self.timers);
        new.timers.reset(None);
        *self = new;
        Ok(())
    }
}

fn restore_registers(model: Model, mac: Mac, state: &[(u32, u32)]) -> Result<Registers, RestoreError> {
    let mut registers = Registers::new(mac);
    for (offset, value) in state {
        let has = offset % 4 == 0 && !model.lacks(*offset);
        let row = map::row(*offset).filter(|_| has).ok_or(RestoreError::Value("offsets of registers"))?;
        let is_link = *offset == spec::LINKS && *value == spec::LINKS_UP_10G;
        if row.counts || is_link {
            registers.set(*offset, *value);
        } else {
            registers.write(*offset, *value);
        }
    }
    Ok(registers)
}

impl Vf {
    fn save(&self) -> VfState {
        let [a, b, c, d] = self.allocation;
        VfState {
            mailbox: self.mailbox.clone(),
            vectors: self.vectors.into(),
            allocation: [a, b, c, d, self.allocation_misc],
            throttle: self.throttle,
        }
    }

    fn restore(&mut self, state: &VfState) -> Result<(), RestoreError> {
        let offsets = (vf::VTIVAR..).step_by(4).take(4).chain([vf::VTIVAR_MISC]);
        let throttle = (vf::VTEITR..).step_by(4);
        let values = offsets.zip(state.allocation).chain(throttle.zip(state.throttle));
        for (offset, value) in values {
            let _ = self.write(offset, value, false, 0);
        }
        self.mailbox = state.mailbox.clone();
        self.vectors = vectors(state.vectors, VECTORS)?;
        Ok(())
    }
}
