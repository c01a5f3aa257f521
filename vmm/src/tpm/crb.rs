//! Registers of a TPM's command response buffer (`TCG PC Client Platform TPM Profile 1.05 §6.5.3`), with locality 0
//! only.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::layout;
use crate::tpm::order::Order;

const LOC_STATE: u64 = 0x00;
const LOC_CTRL: u64 = 0x08;
const LOC_STS: u64 = 0x0c;
const INTF_ID: u64 = 0x30;
const INTF_ID_VENDOR: u64 = 0x34;
const CTRL_REQ: u64 = 0x40;
const CTRL_STS: u64 = 0x44;
const CTRL_CANCEL: u64 = 0x48;
const CTRL_START: u64 = 0x4c;
const CTRL_CMD_SIZE: u64 = 0x58;
const CTRL_CMD_LADDR: u64 = 0x5c;
const CTRL_RSP_SIZE: u64 = 0x64;
const CTRL_RSP_ADDR: u64 = 0x68;
/// Start of the buffer, which extends to the end of the locality.
const BUFFER: u64 = 0x80;

/// Size of the buffer, in bytes.
pub(super) const BUFFER_LEN: usize = 0x1000 - 0x80;
/// Length of a header: tag, size, and command or response code.
pub(super) const HEADER: usize = 10;
/// `TPM_RC_FAILURE`.
const FAILURE: u32 = 0x101;
/// `TPM_RC_COMMAND_SIZE`.
const COMMAND_SIZE: u32 = 0x142;

/// tpmRegValidSts, and locAssigned.
const STATE_VALID: u32 = 1 << 7;
const STATE_ASSIGNED: u32 = 1 << 1;
/// CRB interface of version 1, locality 0 only, transfers of up to 64 bytes, selected.
const INTERFACE: u32 = 1 | 1 << 4 | 3 << 11 | 1 << 14 | 1 << 17;
/// IBM, the vendor of swtpm's library.
const VENDOR: u32 = 0x1014;

/// The registers, and requests to the worker.
pub(super) struct CrbDevice {
    crb: Mutex<Crb>,
    /// Wakes the worker.
    kick: Arc<EventFd>,
}

#[derive(Default)]
struct Crb {
    registers: Registers,
    order: Order,
    /// True if the driver has requested to cancel the running command.
    cancelled: bool,
}

/// Registers of the driver.
struct Registers {
    /// True if the driver has the locality.
    granted: bool,
    /// True until the driver requests the TPM to be ready.
    idle: bool,
    /// True if the TPM has failed.
    fatal: bool,
    /// True while a command runs.
    started: bool,
    buffer: Box<[u8; BUFFER_LEN]>,
}

impl Default for Registers {
    fn default() -> Self {
        Self { granted: false, idle: true, fatal: false, started: false, buffer: Box::new([0; BUFFER_LEN]) }
    }
}

impl CrbDevice {
    /// Creates registers in their power-on state. `kick` is signalled for each request.
    pub(super) fn new(kick: Arc<EventFd>) -> Self {
        Self { crb: Mutex::default(), kick }
    }

    pub(super) fn reset(&self) {
        self.crb.lock().registers = Registers::default();
        self.order(Order::Reset);
    }

    /// Queues a request, replacing one that the worker has not taken.
    pub(super) fn order(&self, order: Order) {
        let mut crb = self.crb.lock();
        // An exit is final, and a command from before a reset is dropped.
        if !matches!((&crb.order, &order), (Order::End, _) | (Order::Reset, Order::Command(_))) {
            crb.order = order;
        }
        drop(crb);
        self.wake();
    }

    fn wake(&self) {
        // A full eventfd has woken the worker already.
        let _ = self.kick.write(1);
    }

    /// Takes the next request. A command is copied out of the buffer here.
    pub(super) fn take_order(&self) -> Order {
        let mut crb = self.crb.lock();
        match std::mem::take(&mut crb.order) {
            Order::None if crb.registers.started => match crb.registers.command() {
                Some(command) => {
                    crb.cancelled = false;
                    Order::Command(command)
                }
                None => {
                    crb.registers.answer(&failure(COMMAND_SIZE));
                    Order::None
                }
            },
            order => order,
        }
    }

    /// True if a request must not wait for the running command.
    pub(super) fn is_urgent(&self) -> bool {
        matches!(self.crb.lock().order, Order::Reset | Order::End)
    }

    /// Takes the driver's request to cancel, if any.
    pub(super) fn take_cancelled(&self) -> bool {
        std::mem::take(&mut self.crb.lock().cancelled)
    }

    /// Completes the running command, unless the machine was reset since then. `None`: the TPM has failed.
    pub(super) fn answer(&self, response: Option<&[u8]>) {
        let mut crb = self.crb.lock();
        if matches!(crb.order, Order::Reset | Order::End) {
            return;
        }
        crb.registers.fatal = response.is_none();
        match response {
            Some(response) => crb.registers.answer(response),
            None => crb.registers.answer(&failure(FAILURE)),
        }
    }

    /// Reads `data.len()` bytes, 1 to 8, at `offset`.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let registers = &self.crb.lock().registers;
        data.iter_mut().zip(offset..).for_each(|(byte, offset)| *byte = registers.byte(offset));
    }

    /// Writes `data`, 1 to 8 bytes, at `offset`.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let mut crb = self.crb.lock();
        if let Some(at) = offset.checked_sub(BUFFER) {
            crb.registers.write_buffer(at, data);
            return;
        }
        // Registers are written whole; only the lowest byte of each has writable bits.
        let Some(value) = data.first() else { return };
        let (registers, first, second) = (&mut crb.registers, value & 1 != 0, value & 2 != 0);
        let mut wakes = false;
        match offset {
            // relinquish, and requestAccess.
            LOC_CTRL if second => registers.granted = false,
            LOC_CTRL if first => registers.granted = true,
            // goIdle, and cmdReady.
            CTRL_REQ if second && !registers.started => registers.idle = true,
            CTRL_REQ if first => registers.idle = false,
            CTRL_START if first && registers.granted && !registers.started => {
                registers.started = true;
                registers.idle = false;
                wakes = true;
            }
            CTRL_CANCEL if first && registers.started => {
                crb.cancelled = true;
                wakes = true;
            }
            _ => {}
        }
        drop(crb);
        if wakes {
            self.wake();
        }
    }
}

impl Registers {
    fn byte(&self, offset: u64) -> u8 {
        if let Some(at) = offset.checked_sub(BUFFER) {
            return usize::try_from(at).ok().and_then(|at| self.buffer.get(at)).copied().unwrap_or(0xff);
        }
        let dword = self.dword(offset & !3).to_le_bytes();
        usize::try_from(offset & 3).ok().and_then(|n| dword.get(n)).copied().unwrap_or(0xff)
    }

    fn dword(&self, offset: u64) -> u32 {
        let flag = |flag: bool, bit: u32| u32::from(flag) << bit;
        match offset {
            LOC_STATE if self.granted => STATE_VALID | STATE_ASSIGNED,
            LOC_STATE => STATE_VALID,
            LOC_STS => flag(self.granted, 0),
            INTF_ID => INTERFACE,
            INTF_ID_VENDOR => VENDOR,
            CTRL_STS => flag(self.fatal, 0) | flag(self.idle, 1),
            CTRL_START => flag(self.started, 0),
            CTRL_CMD_SIZE | CTRL_RSP_SIZE => BUFFER_LEN as u32,
            // The address is below 4 GiB.
            CTRL_CMD_LADDR | CTRL_RSP_ADDR => layout::TPM.start as u32 + BUFFER as u32,
            _ => 0,
        }
    }

    fn write_buffer(&mut self, at: u64, data: &[u8]) {
        let Ok(at) = usize::try_from(at) else { return };
        if !self.started {
            self.buffer.iter_mut().skip(at).zip(data).for_each(|(to, from)| *to = *from);
        }
    }

    /// Returns the command in the buffer, if its size is valid.
    fn command(&self) -> Option<Vec<u8>> {
        let size = u32::from_be_bytes(*self.buffer.get(2..)?.first_chunk()?);
        let size = usize::try_from(size).ok().filter(|size| *size >= HEADER)?;
        self.buffer.get(..size).map(<[u8]>::to_vec)
    }

    fn answer(&mut self, response: &[u8]) {
        self.buffer.iter_mut().zip(response).for_each(|(to, from)| *to = *from);
        self.started = false;
    }
}

/// Creates a response with this code and without sessions.
fn failure(code: u32) -> [u8; HEADER] {
    let [a, b, c, d] = code.to_be_bytes();
    [0x80, 0x01, 0, 0, 0, HEADER as u8, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn device() -> CrbDevice {
        CrbDevice::new(Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()))
    }

    fn read(device: &CrbDevice, offset: u64) -> u32 {
        let mut data = [0; 4];
        device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(device: &CrbDevice, offset: u64, value: u32) {
        device.write(offset, &value.to_le_bytes());
    }

    /// Writes a command of this size and starts it.
    fn start(device: &CrbDevice, size: u32) {
        device.write(BUFFER, &[0x80, 0x01]);
        device.write(BUFFER + 2, &size.to_be_bytes());
        write(device, CTRL_START, 1);
    }

    #[test]
    fn a_driver_finds_the_interface_and_its_buffer() {
        let device = device();
        assert_eq!((read(&device, INTF_ID), read(&device, INTF_ID_VENDOR)), (0x2_5811, 0x1014));
        assert_eq!((read(&device, CTRL_CMD_SIZE), read(&device, CTRL_RSP_SIZE)), (0xf80, 0xf80));
        assert_eq!((read(&device, CTRL_CMD_LADDR), read(&device, CTRL_CMD_LADDR + 4)), (0xfed4_0080, 0));
        let mut wide = [0; 8];
        device.read(CTRL_RSP_ADDR, &mut wide);
        assert_eq!(u64::from_le_bytes(wide), 0xfed4_0080);
        assert_eq!((read(&device, LOC_STATE), read(&device, CTRL_STS)), (0x80, 2));
        let mut past = [0; 8];
        device.read(0xffc, &mut past);
        assert_eq!(past, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        device.write(0xffc, &[1; 8]);
        device.read(0xffc, &mut past);
        assert_eq!(past[..5], [1, 1, 1, 1, 0xff]);
    }

    #[test]
    fn a_command_needs_the_locality_and_is_answered_in_its_place() {
        let device = device();
        start(&device, 12);
        assert!(matches!(device.take_order(), Order::None), "it does not have the locality");
        write(&device, LOC_CTRL, 1);
        assert_eq!((read(&device, LOC_STS), read(&device, LOC_STATE)), (1, 0x82));
        write(&device, CTRL_REQ, 1);
        assert_eq!((read(&device, CTRL_REQ), read(&device, CTRL_STS)), (0, 0));
        start(&device, 12);
        assert_eq!(read(&device, CTRL_START), 1);
        let Order::Command(command) = device.take_order() else { panic!("no command") };
        assert_eq!((command.len(), &command[..6]), (12, &[0x80, 0x01, 0, 0, 0, 12][..]));
        write(&device, BUFFER, 0);
        device.answer(Some(&[7; 20]));
        assert_eq!((read(&device, CTRL_START), read(&device, BUFFER + 16)), (0, 0x0707_0707));
        write(&device, CTRL_REQ, 2);
        write(&device, LOC_CTRL, 2);
        assert_eq!((read(&device, CTRL_STS), read(&device, LOC_STS)), (2, 0));
    }

    #[test]
    fn a_command_of_an_impossible_size_fails_at_once() {
        for size in [0, 9, 0xf81, u32::MAX] {
            let device = device();
            write(&device, LOC_CTRL, 1);
            start(&device, size);
            assert!(matches!(device.take_order(), Order::None));
            let mut response = [0; HEADER];
            (0..).step_by(5).zip(response.chunks_mut(5)).for_each(|(at, part)| device.read(BUFFER + at, part));
            assert_eq!((response, read(&device, CTRL_START)), (failure(COMMAND_SIZE), 0));
        }
    }

    #[test]
    fn a_lost_tpm_is_a_fatal_error() {
        let device = device();
        write(&device, LOC_CTRL, 1);
        start(&device, 10);
        assert!(matches!(device.take_order(), Order::Command(_)));
        device.answer(None);
        assert_eq!((read(&device, CTRL_STS), read(&device, CTRL_START)), (1, 0));
    }

    #[test]
    fn a_reset_drops_the_command_and_its_answer() {
        let device = device();
        write(&device, LOC_CTRL, 1);
        start(&device, 10);
        assert!(matches!(device.take_order(), Order::Command(_)));
        device.reset();
        assert!(device.is_urgent());
        device.answer(Some(&[7; 20]));
        assert_eq!((read(&device, BUFFER), read(&device, CTRL_STS), read(&device, LOC_STS)), (0, 2, 0));
        write(&device, LOC_CTRL, 1);
        start(&device, 10);
        assert!(matches!(device.take_order(), Order::Reset));
        assert!(matches!(device.take_order(), Order::Command(_)), "it waited for the reset");
        device.order(Order::End);
        device.order(Order::Reset);
        assert!(matches!(device.take_order(), Order::End));
    }
}
