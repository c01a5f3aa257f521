//! The registers of flow rules: commands, masks and counts.

use std::sync::Arc;

use crate::effects::Effects;
use crate::flow::{Added, FlowTable, Flows, RuleState, command};
use crate::nic::Nic;
use crate::spec;

/// The registers that a rule is made of, besides FDIRHASH and FDIRCMD.
const FIELDS: [u32; 4] = [spec::FDIRIPSA, spec::FDIRIPDA, spec::FDIRPORT, spec::FDIRVLAN];

impl Nic {
    /// The flow rules. They concern all frames that the NIC receives, from the uplink and from its pools, and decide
    /// before RSS does. The value stays as it is; [`Effects::steering`] says when to ask again.
    pub fn flows(&self) -> Arc<Flows> {
        self.flow_table.flows()
    }

    /// The number of flow rules, at most 2,048.
    pub fn flow_rules(&self) -> usize {
        self.flow_table.len()
    }

    /// True if a write of `offset` concerns rules. Others of their registers are storage.
    pub(crate) fn is_flow_register(offset: u32) -> bool {
        matches!(offset, spec::FDIRCTRL | spec::FDIRCMD | spec::FDIRDIP4M..=spec::FDIRUDPM | spec::FDIRM)
            || offset == spec::FDIRSCTPM
    }

    /// Writes one of these registers.
    pub(crate) fn write_flow_register(&mut self, offset: u32, value: u32) -> Effects {
        let changed = self.registers.write(offset, value);
        match offset {
            spec::FDIRCMD => return self.run_flow_command(value),
            // A write starts the initialization of the table, which ends at once.
            spec::FDIRCTRL => self.flow_table.clear(&self.registers, self.model),
            _ if changed => self.flow_table.rebuild(&self.registers, self.model),
            _ => return Effects::NONE,
        }
        Effects::STEERING
    }

    fn run_flow_command(&mut self, value: u32) -> Effects {
        let hash = self.registers.get(spec::FDIRHASH);
        let mut shown = self.registers.get(spec::FDIRCMD) & !command::VALID;
        let mut effects = Effects::NONE;
        if value & command::CLEAR != 0 {
            self.flow_table.clear(&self.registers, self.model);
            effects = Effects::STEERING;
        }
        match value & command::OPERATION {
            command::ADD => {
                let added = self.flow_table.add(hash, value, FIELDS.map(|offset| self.registers.get(offset)));
                match added {
                    Added::Yes => {
                        self.add_half(spec::FDIRUSTAT, 0, 0xffff);
                        let longest = self.registers.get(spec::FDIRLEN);
                        let list = self.flow_table.list(hash);
                        if list & 0x3f > longest & 0x3f {
                            self.registers.set(spec::FDIRLEN, list);
                        }
                    }
                    Added::Full => self.add_half(spec::FDIRFSTAT, 0, 0xff),
                    Added::Inactive => {}
                }
                effects = Effects::STEERING;
            }
            command::REMOVE => {
                if self.flow_table.remove(hash) {
                    self.add_half(spec::FDIRUSTAT, 16, 0xffff);
                } else {
                    self.add_half(spec::FDIRFSTAT, 8, 0xff);
                }
                effects = Effects::STEERING;
            }
            command::QUERY => shown = self.flow_table.query(hash).unwrap_or(shown),
            _ => {}
        }
        self.registers.set(spec::FDIRCMD, shown);
        effects
    }

    /// Counts one more in a field of a statistic, up to the field's largest value.
    fn add_half(&mut self, offset: u32, shift: u32, largest: u32) {
        let value = self.registers.get(offset);
        if value >> shift & largest != largest {
            self.registers.set(offset, value.wrapping_add(1 << shift));
        }
    }

    /// FDIRFREE.
    pub(crate) fn free_flow_rules(&self) -> u32 {
        u32::try_from(self.flow_table.free()).unwrap_or(0)
    }

    /// The rules of a saved state, in a table for the registers that were restored. `None` if they are too many.
    pub(crate) fn restore_flows(&mut self, rules: &[RuleState]) -> Option<()> {
        let mut table = FlowTable::new(&self.registers, self.model);
        for [hash, command, fields @ ..] in rules {
            if table.add(*hash, *command, *fields) != Added::Yes {
                return None;
            }
        }
        self.flow_table = table;
        Some(())
    }
}
