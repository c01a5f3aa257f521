//! The copper PHY behind clause 45 MDIO at port 0 (`MDIO Register Interface`). A command ends at once.

use crate::model::Model;
use crate::spec;

/// MDI Command, in MSCA.
const COMMAND: u32 = 1 << 30;
/// Start of frame of clause 22, in MSCA 29:28; clause 45 has 0.
const CLAUSE_22: u32 = 1 << 28;

/// The registers that drivers write: device and register.
const STORED: [(u32, u16); 6] = [(7, 0), (7, 16), (7, 19), (7, 32), (7, 0xc400), (30, 0)];

/// MSCA, MSRWD and the registers behind them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Phy {
    /// MSCA, without the command bit.
    pub command: u32,
    /// MSRWD: data to write in 15:0, data that was read in 31:16.
    pub data: u32,
    /// Register address of the last address cycle.
    pub address: u16,
    /// Values of the registers that software can write.
    pub stored: [u16; 6],
}

impl Phy {
    /// MSCA or MSRWD.
    pub(crate) fn peek(&self, offset: u32) -> u32 {
        if offset == spec::MSCA { self.command } else { self.data }
    }

    /// Writes MSCA or MSRWD.
    pub(crate) fn write(&mut self, offset: u32, value: u32, link_up: bool, model: Model) {
        if offset == spec::MSRWD {
            self.data = self.data & 0xffff_0000 | value & 0xffff;
            return;
        }
        self.command = value & !COMMAND;
        if value & COMMAND != 0 {
            self.run(value, link_up, model);
        }
    }

    fn run(&mut self, command: u32, link_up: bool, model: Model) {
        let (device, port) = (command >> 16 & 0x1f, command >> 21 & 0x1f);
        let present = port == 0 && command & CLAUSE_22 == 0;
        let [low, high, ..] = command.to_le_bytes();
        match command >> 26 & 3 {
            0 => self.address = u16::from_le_bytes([low, high]),
            1 if present => {
                let [low, high, ..] = self.data.to_le_bytes();
                let place = STORED.iter().position(|at| *at == (device, self.address));
                if let Some(register) = place.and_then(|place| self.stored.get_mut(place)) {
                    *register = u16::from_le_bytes([low, high]);
                }
            }
            1 => {}
            operation => {
                let read = if present { self.read(device, link_up, model) } else { 0xffff };
                self.data = self.data & 0xffff | u32::from(read) << 16;
                // Operation 2 is a read after which the address increments.
                self.address = self.address.wrapping_add(u16::from(operation == 2));
            }
        }
    }

    fn read(&self, device: u32, link_up: bool, model: Model) -> u16 {
        let place = STORED.iter().position(|at| *at == (device, self.address));
        if let Some(register) = place.and_then(|place| self.stored.get(place)) {
            return *register;
        }
        match (device, self.address) {
            // Status 1: link, and autonegotiation complete.
            (7, 1) if link_up => 0x24,
            (1..=4, 1) if link_up => 0x4,
            (1..=30, 2) => 0x0154,
            (1..=30, 3) => model.phy(),
            // Speeds: 10 Gbit/s, 1 Gbit/s, 100 Mbit/s and 10 Mbit/s.
            (1, 4) => 0x71,
            // Status 2: a device responds at this address.
            (1..=30, 8) => 0x8000,
            // Extended abilities: 10GBASE-T, 1000BASE-T, 100BASE-TX.
            (1, 11) => 0xa4,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(phy: &mut Phy, operation: u32, device: u32, port: u32, address: u32) {
        let msca = COMMAND | 1 << 31 | operation << 26 | port << 21 | device << 16 | address;
        phy.write(spec::MSCA, msca, true, Model::X550);
        assert_eq!(phy.peek(spec::MSCA), msca & !COMMAND, "the command ended");
    }

    fn read(phy: &mut Phy, device: u32, address: u32) -> u32 {
        command(phy, 0, device, 0, address);
        command(phy, 3, device, 0, 0);
        phy.peek(spec::MSRWD) >> 16
    }

    /// X7: PHY.
    #[test]
    fn constant_registers_identify_the_phy() {
        let mut phy = Phy::default();
        for (device, address, value) in [
            (1, 2, 0x0154),
            (30, 3, 0x0221),
            (1, 4, 0x71),
            (3, 8, 0x8000),
            (1, 11, 0xa4),
            (1, 1, 4),
            (7, 1, 0x24),
            (3, 0xe800, 0),
            (0, 2, 0),
            (31, 2, 0),
        ] {
            assert_eq!(read(&mut phy, device, address), value, "({device}, {address:#x})");
            phy.write(spec::MSRWD, 0x1234, true, Model::X550);
            command(&mut phy, 1, device, 0, 0);
            assert_eq!(read(&mut phy, device, address), value, "read-only");
        }
    }

    #[test]
    fn the_phy_of_an_x540_has_its_own_identifier() {
        let mut phy = Phy { address: 3, ..Phy::default() };
        phy.write(spec::MSCA, COMMAND | 3 << 26 | 1 << 16, true, Model::X540);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0x0200);
    }

    #[test]
    fn control_registers_are_stored() {
        for (n, (device, address)) in (1..).zip(STORED) {
            let mut phy = Phy::default();
            command(&mut phy, 0, device, 0, address.into());
            phy.write(spec::MSRWD, 0xffff_0000 | n, true, Model::X550);
            command(&mut phy, 1, device, 0, 0);
            assert_eq!(phy.peek(spec::MSRWD), n, "software cannot write what was read");
            assert_eq!(read(&mut phy, device, address.into()), n);
        }
    }

    #[test]
    fn a_read_may_increment_the_address() {
        let mut phy = Phy::default();
        command(&mut phy, 0, 1, 0, 2);
        command(&mut phy, 2, 1, 0, 0);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0x0154);
        command(&mut phy, 2, 1, 0, 0);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0x0221);
    }

    #[test]
    fn other_ports_and_clause_22_have_no_phy() {
        let mut phy = Phy::default();
        command(&mut phy, 0, 1, 0, 2);
        command(&mut phy, 3, 1, 1, 0);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0xffff);
        phy.write(spec::MSCA, COMMAND | CLAUSE_22 | 3 << 26 | 1 << 16, true, Model::X550);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0xffff);
        phy.write(spec::MSCA, 3 << 26 | 1 << 16, true, Model::X550);
        assert_eq!(phy.peek(spec::MSRWD) >> 16, 0xffff, "no command");
    }
}
