//! The consoles of a VM: the serial port, the virtio console and the debug console.

use std::path::Path;

use virtio_devices::SocketHandle;

use crate::serial::SerialConsole;
use crate::serial::debug::DebugConsole;
use crate::serial::end::ConsoleEnd;
use crate::vm::{Vm, VmError};

impl Vm {
    /// Starts to read the serial port's input, after the port has its state.
    ///
    /// # Errors
    ///
    /// Fails if no thread can be started.
    pub fn read_input(&mut self) -> Result<(), VmError> {
        self.serial.as_mut().map_or(Ok(()), |serial| Ok(serial.read_input()?))
    }

    /// Puts the terminal into raw mode until the VM is dropped, if a console uses it. The caller must already catch
    /// signals, so that the terminal is restored.
    ///
    /// # Errors
    ///
    /// Fails if the terminal cannot be set.
    pub fn take_terminal(&mut self) -> Result<(), VmError> {
        if let Some(serial) = &mut self.serial {
            serial.take_terminal()?;
        }
        if let Some(console) = &mut self.console {
            console.take_terminal()?;
        }
        Ok(())
    }

    /// Passes the terminal's size to the virtio console, if a terminal shows the console.
    pub fn follow_terminal(&self) {
        self.console.iter().for_each(ConsoleEnd::follow_size);
    }

    /// The pseudo-terminals of the serial port, the virtio console and the debug console, in this order.
    pub fn ptys(&self) -> [Option<&Path>; 3] {
        self.ends().map(|end| end.and_then(|end| end.device().pty()))
    }

    /// The listening sockets of vsock and consoles.
    pub(crate) fn sockets(&self) -> Vec<SocketHandle> {
        let ends = self.ends().into_iter().flatten().filter_map(|end| end.device().socket());
        ends.chain(self.devices.sockets()).collect()
    }

    /// The host sides of the serial port, the virtio console and the debug console, in this order.
    pub(super) fn ends(&self) -> [Option<&ConsoleEnd>; 3] {
        let serial = self.serial.as_ref().map(SerialConsole::end);
        [serial, self.console.as_ref(), self.debug_console.as_ref().map(DebugConsole::end)]
    }
}
