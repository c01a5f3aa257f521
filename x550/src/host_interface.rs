//! Commands to the management firmware through its buffer (`Host Interface Commands`). They end at once.

use crate::model::Model;
use crate::nvm;
use crate::spec;

/// EN in HICR: the interface is enabled.
const ENABLED: u32 = 1 << 0;
/// C in HICR: software wrote a command.
const COMMAND: u32 = 1 << 1;
/// SV in HICR: the status of the last command is valid.
const STATUS_VALID: u32 = 1 << 2;
/// Status of a command that succeeded.
const SUCCESS: u8 = 1;
/// Status of a command that is not supported.
const UNSUPPORTED: u8 = 2;
/// Dwords of the buffer.
pub(crate) const DWORDS: usize = 448;

/// The buffer and its control register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostInterface {
    model: Model,
    pub(crate) buffer: Box<[u32]>,
    pub(crate) status_valid: bool,
}

/// Consequence of a command outside of the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// None.
    Nothing,
    /// Clear RXCTRL.RXEN.
    DisableReceive,
}

impl HostInterface {
    pub(crate) fn new(model: Model) -> Self {
        Self { model, buffer: vec![0; DWORDS].into(), status_valid: false }
    }

    /// True if `offset` is in the buffer.
    pub(crate) fn has(offset: u32) -> bool {
        (spec::FLEX_MNG..spec::FLEX_MNG + spec::FLEX_MNG_LEN).contains(&offset)
    }

    /// A dword of the buffer, or HICR. FWSTS reads 0: the firmware was not reset.
    pub(crate) fn peek(&self, offset: u32) -> u32 {
        match offset {
            spec::HICR => ENABLED | if self.status_valid { STATUS_VALID } else { 0 },
            spec::FWSTS => 0,
            _ => Self::place(offset).and_then(|place| self.buffer.get(place)).copied().unwrap_or(0),
        }
    }

    fn place(offset: u32) -> Option<usize> {
        usize::try_from(offset.checked_sub(spec::FLEX_MNG)? / 4).ok()
    }

    /// Writes a dword of the buffer, or HICR.
    pub(crate) fn write(&mut self, offset: u32, value: u32) -> Request {
        if offset == spec::HICR {
            self.status_valid = value & COMMAND != 0;
            return if self.status_valid { self.run() } else { Request::Nothing };
        }
        if let Some(dword) = Self::place(offset).and_then(|place| self.buffer.get_mut(place)) {
            *dword = value;
        }
        Request::Nothing
    }

    fn run(&mut self) -> Request {
        let (mut request, mut status) = (Request::Nothing, SUCCESS);
        let head = |n: usize| self.buffer.get(n).copied().unwrap_or(0).to_le_bytes();
        let [command, ..] = head(0);
        match command {
            0x31 => {
                let address = u32::from_be_bytes(head(1));
                let [high, low, ..] = head(2);
                self.read_nvm(address / 2, usize::from(u16::from_be_bytes([high, low])));
            }
            // Writes of the flash are accepted, and have no effect; so has the driver's version.
            0x33 | 0xdd => {}
            0xde => request = Request::DisableReceive,
            _ => status = UNSUPPORTED,
        }
        // The reply has a header alone, whose bytes sum up to 0.
        let checksum = 0u8.wrapping_sub(command).wrapping_sub(status);
        if let Some(header) = self.buffer.first_mut() {
            *header = u32::from_le_bytes([command, 0, status, checksum]);
        }
        request
    }

    /// Reads `len` bytes of flash from word `first` on into the buffer, as much as fits from its fourth dword on.
    fn read_nvm(&mut self, first: u32, len: usize) {
        let model = self.model;
        let words = (first..).map(|at| u16::try_from(at).map_or(0xffff, |at| nvm::word(model, at)));
        let mut words = words.take(len.div_ceil(2));
        for dword in self.buffer.iter_mut().skip(3) {
            let Some(low) = words.next() else { break };
            *dword = u32::from(low) | u32::from(words.next().unwrap_or(0)) << 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the dwords and runs the command.
    fn run(firmware: &mut HostInterface, dwords: &[u32]) -> Request {
        for (offset, dword) in (spec::FLEX_MNG..).step_by(4).zip(dwords) {
            assert_eq!(firmware.write(offset, *dword), Request::Nothing);
        }
        let request = firmware.write(spec::HICR, ENABLED | COMMAND);
        assert_eq!(firmware.peek(spec::HICR), ENABLED | STATUS_VALID, "done");
        request
    }

    fn read(firmware: &mut HostInterface, byte: u32, len: u16) -> [u32; 2] {
        let [high, low] = len.to_be_bytes();
        let length = u32::from_le_bytes([high, low, 0, 0]);
        assert_eq!(run(firmware, &[0x31, byte.swap_bytes(), length]), Request::Nothing);
        [3, 4].map(|n| firmware.peek(spec::FLEX_MNG + 4 * n))
    }

    /// X6: flash.
    #[test]
    fn shadow_ram_is_read_from_the_fourth_dword_on() {
        let mut firmware = HostInterface::new(Model::X550);
        assert_eq!(firmware.peek(spec::HICR), ENABLED);
        assert_eq!(read(&mut firmware, 0x15 * 2, 6), [0x0060_fafa, 0xffff]);
        assert_eq!(firmware.peek(spec::FLEX_MNG) & 0x00ff_ffff, 0x0001_0031);
        assert_eq!(read(&mut firmware, 0x2e * 2, 2)[0], 0x8000);
    }

    #[test]
    fn any_length_and_address_stays_in_the_buffer() {
        let mut firmware = HostInterface::new(Model::X550);
        for (byte, len) in [(0, u16::MAX), (u32::MAX, u16::MAX), (0x1_fffe, 4), (0, 0)] {
            let read = read(&mut firmware, byte, len);
            assert_eq!(firmware.buffer.len(), DWORDS);
            assert!(byte != 0x1_fffe || read[0] == 0xffff_ffff, "beyond the flash");
        }
    }

    #[test]
    fn each_command_has_a_reply_with_its_status() {
        for (command, status, request) in [
            (0x33, SUCCESS, Request::Nothing),
            (0xdd, SUCCESS, Request::Nothing),
            (0xde, SUCCESS, Request::DisableReceive),
            (0x77, UNSUPPORTED, Request::Nothing),
        ] {
            let mut firmware = HostInterface::new(Model::X550);
            assert_eq!(run(&mut firmware, &[0xff_0500 | command]), request);
            let reply = firmware.peek(spec::FLEX_MNG).to_le_bytes();
            assert_eq!(reply[..3], [u8::try_from(command).unwrap(), 0, status]);
            assert_eq!(reply.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        }
    }

    #[test]
    fn a_write_without_the_command_bit_runs_nothing() {
        let mut firmware = HostInterface::new(Model::X550);
        assert_eq!(firmware.write(spec::FLEX_MNG, 0xde), Request::Nothing);
        assert_eq!(firmware.write(spec::HICR, ENABLED), Request::Nothing);
        assert_eq!((firmware.peek(spec::HICR), firmware.peek(spec::FLEX_MNG)), (ENABLED, 0xde));
    }
}
