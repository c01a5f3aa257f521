//! The configuration space that the guest sees: registers of this program, with bits passed through to the host.
//!
//! It makes no host accesses: the result of a read has the bits to read from the host, that of a write the bits to
//! write there.

mod capabilities;
mod msi;

use pci::spec::{bar, command, header, pcie, status};
use pci::{
    BarError, BarIndex, BarKind, BarSet, Dword, DwordWrite, Effects, Msix, MsixError, MsixShape, Power, ResetKind,
    Window, WindowId,
};

use crate::vfio::config_space::capabilities::{Capabilities, Owned, Passed, Register};
use crate::vfio::config_space::msi::Msi;

/// Writable bits of Command.
const COMMAND: u16 = command::MEMORY_SPACE
    | command::BUS_MASTER
    | command::PARITY_ERROR_RESPONSE
    | command::SERR
    | command::INTERRUPT_DISABLE;
/// Bits of Command that are passed through to the host's Command.
const HOST_COMMAND: u16 = command::PARITY_ERROR_RESPONSE | command::SERR;
/// Interrupt Pin of the only function of a device that has one.
const INTA: u32 = 1;
/// The error bits of Status, which a 1 clears (`PCIe 6.2 §7.5.1.1.4`).
const STATUS_ERRORS: u32 = 0xf900_0000;
/// The smallest BAR of a function here, in bytes.
const SMALLEST_BAR: u64 = 128;

/// Reason why a device cannot be shown to a guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The device has no interrupts.
    #[error("it has neither MSI-X nor MSI, and no interrupt pin that the host can mask; give another device")]
    NoInterrupts,
    /// Impossible BARs.
    #[error("its BARs are not those of a PCI device: {0}")]
    Bars(#[from] BarError),
    /// Impossible MSI-X capability.
    #[error("its MSI-X capability is not that of a PCI device: {0}")]
    Msix(#[from] MsixError),
}

/// The registers that the guest sees.
#[derive(Debug)]
pub(super) struct ConfigSpace {
    /// Device and Vendor ID, class and revision, and subsystem, from the device.
    id: u32,
    class: u32,
    subsystem: u32,
    command: u16,
    cache_line_size: u8,
    bars: BarSet,
    capabilities: Capabilities,
    power: Option<Power>,
    msi: Option<Msi>,
    msix: Option<Msix>,
    /// Interrupt Line of a function with the pin INTA; software may write it, and the function does not use it.
    line: Option<Line>,
    /// True if the guest can reset the function.
    flr: bool,
}

/// The Interrupt Line register.
#[derive(Debug, Clone, Copy)]
struct Line {
    value: u8,
    at_reset: u8,
}

/// Effects of a write beyond the registers here.
#[derive(Debug, PartialEq, Eq, Default)]
pub(super) struct Written {
    /// State that may have changed.
    pub effects: Effects,
    /// Write to the host's dword, if there is one.
    pub through: Option<Through>,
    /// True if the function must be reset. Its registers are reset already.
    pub flr: bool,
    /// True if the host's Command must be set again, to [`ConfigSpace::host_command`].
    pub command: bool,
}

/// A write to some bits of a host dword.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Through {
    reg: Dword,
    write: DwordWrite,
    passed: Passed,
}

/// A write of 1, 2 or 4 bytes at a natural boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostWrite {
    /// Offset of the write.
    pub offset: u16,
    bytes: [u8; 4],
    len: usize,
}

impl HostWrite {
    /// Bytes to write.
    pub(super) fn data(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl Through {
    /// The written dword.
    pub(super) fn reg(&self) -> Dword {
        self.reg
    }

    /// The host writes that make it, if the host's dword is `old`.
    pub(super) fn writes(&self, old: u32) -> Vec<HostWrite> {
        let Passed { write: writable, clear, .. } = self.passed;
        // Writing back a 1 that was read would clear the bit.
        let kept = old & !clear;
        let bytes = self.write.apply(kept, writable).to_le_bytes();
        let touched = (self.write.mask() & writable).to_le_bytes().map(|mask| mask != 0);
        let mut writes = Vec::new();
        let mut put = |first: u16, len: usize| {
            let mut data = [0; 4];
            let from = bytes.iter().skip(first.into()).take(len);
            data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            writes.push(HostWrite { offset: self.reg.offset() + first, bytes: data, len });
        };
        match touched {
            [true, true, true, true] => put(0, 4),
            [a, b, c, d] => {
                for (first, pair) in [(0, [a, b]), (2, [c, d])] {
                    match pair {
                        [true, true] => put(first, 2),
                        [true, false] => put(first, 1),
                        [false, true] => put(first + 1, 1),
                        [false, false] => {}
                    }
                }
            }
        }
        writes
    }
}

impl ConfigSpace {
    /// The configuration space of a device with the configuration space `image` and memory BARs of these sizes in
    /// bytes. With `flr`, the device can be reset. `line` is the value that firmware would have written to its
    /// Interrupt Line; `None` if it has no interrupt pin.
    ///
    /// # Errors
    ///
    /// Fails if the shape of the function is impossible, or it has no interrupts.
    pub(super) fn new(image: &[u8], sizes: [u64; 6], flr: bool, line: Option<u8>) -> Result<Self, ConfigError> {
        let dword = |offset: u16| {
            let at = |n| image.get(usize::from(offset) + n).copied().unwrap_or(0);
            u32::from_le_bytes([at(0), at(1), at(2), at(3)])
        };
        let bars = BarSet::new(&kinds(sizes, dword))?;
        let capabilities = Capabilities::of(image, flr);
        let msix = capabilities.offset(Owned::Msix).map(|offset| msix_shape(offset, dword));
        let msix = msix.map(|shape| Msix::new(shape, &bars)).transpose()?;
        let msi = capabilities.offset(Owned::Msi).map(|offset| Msi::new(dword(offset) >> 16));
        if msi.is_none() && msix.is_none() && line.is_none() {
            return Err(ConfigError::NoInterrupts);
        }
        Ok(Self {
            id: dword(header::ID),
            class: dword(header::CLASS_REVISION),
            subsystem: dword(header::SUBSYSTEM),
            command: 0,
            cache_line_size: 0,
            bars,
            power: capabilities.offset(Owned::Power).map(|_| Power::default()),
            capabilities,
            msi,
            msix,
            line: line.map(|line| Line { value: line, at_reset: line }),
            flr,
        })
    }

    /// MSI, if the device has it.
    pub(super) fn msi(&self) -> Option<&Msi> {
        self.msi.as_ref()
    }

    /// MSI-X, if the device has it.
    pub(super) fn msix(&self) -> Option<&Msix> {
        self.msix.as_ref()
    }

    /// MSI-X, for writes to its table.
    pub(super) fn msix_mut(&mut self) -> Option<&mut Msix> {
        self.msix.as_mut()
    }

    /// True if the function interrupts through its pin: it has one, and neither MSI nor MSI-X is enabled (`PCIe 6.2
    /// §7.5.1.1.3`).
    pub(super) fn uses_pin(&self) -> bool {
        let sends = self.msi().is_some_and(Msi::enabled) || self.msix().is_some_and(Msix::enabled);
        self.line.is_some() && !sends
    }

    /// True if the function may access memory and send messages.
    pub(super) fn bus_master(&self) -> bool {
        self.command & command::BUS_MASTER != 0 && self.is_d0()
    }

    /// True if the function is in D0.
    pub(super) fn is_d0(&self) -> bool {
        self.power.as_ref().is_none_or(Power::is_d0)
    }

    /// Value for the host's Command. The host device always decodes memory: the guest's view is decided here, and a
    /// process that accesses a mapping of memory that is not decoded is killed.
    pub(super) fn host_command(&self) -> u16 {
        let master = if self.bus_master() { command::BUS_MASTER } else { 0 };
        let no_pin =
            if self.line.is_some() { self.command & command::INTERRUPT_DISABLE } else { command::INTERRUPT_DISABLE };
        command::MEMORY_SPACE | no_pin | master | self.command & HOST_COMMAND
    }

    /// Appends the windows that the function decodes.
    pub(super) fn windows(&self, out: &mut Vec<Window>) {
        if self.command & command::MEMORY_SPACE != 0 && self.is_d0() {
            self.bars.windows(1, WindowId::Bar, out);
        }
    }

    /// Value of the dword `reg`: the bits of this program, and a mask of the bits to read from the host. `pending`
    /// returns the pending bit of an MSI vector.
    pub(super) fn read(&self, reg: Dword, pending: impl Fn(u16) -> bool) -> (u32, u32) {
        if reg.offset() < header::FIRST_CAPABILITY {
            return self.read_header(reg.offset());
        }
        match self.capabilities.register(reg) {
            None => (0, 0),
            Some(Register::Passed(passed) | Register::DeviceControl(passed)) => (passed.fixed, passed.read),
            Some(Register::Owned(owned, inner)) => {
                let value = match owned {
                    Owned::Power => self.power.as_ref().map_or(0, |power| power.read(inner)),
                    Owned::Msi => self.msi.as_ref().map_or(0, |msi| msi.read(inner, pending)),
                    Owned::Msix => self.msix.as_ref().map_or(0, |msix| msix.read(inner)),
                };
                let next = if inner.offset() == 0 { self.capabilities.next(owned) } else { 0 };
                (value | next, 0)
            }
        }
    }

    fn read_header(&self, offset: u16) -> (u32, u32) {
        let own = match offset {
            header::ID => self.id,
            header::COMMAND_STATUS => {
                let has_list = if self.capabilities.head() == 0 { 0 } else { status::CAPABILITIES_LIST };
                let pin = if self.line.is_some() { u32::from(status::INTERRUPT) << 16 } else { 0 };
                return (u32::from(self.command) | u32::from(has_list) << 16, STATUS_ERRORS | pin);
            }
            header::CLASS_REVISION => self.class,
            header::CACHE_LINE_HEADER_TYPE => self.cache_line_size.into(),
            header::BAR0..=header::BAR5 => self.bars.read((offset - header::BAR0) / 4),
            header::SUBSYSTEM => self.subsystem,
            header::CAPABILITIES => self.capabilities.head().into(),
            header::INTERRUPT => self.line.map_or(0, |line| INTA << 8 | u32::from(line.value)),
            _ => 0,
        };
        (own, 0)
    }

    /// Writes the dword at `reg`.
    pub(super) fn write(&mut self, reg: Dword, write: DwordWrite) -> Written {
        if reg.offset() < header::FIRST_CAPABILITY {
            return self.write_header(reg, write);
        }
        match self.capabilities.register(reg) {
            None => Written::default(),
            Some(Register::Passed(passed)) => through(reg, write, passed),
            Some(Register::DeviceControl(passed)) => {
                if self.flr && write.value() & pcie::INITIATE_FLR != 0 {
                    return Written { effects: self.reset(ResetKind::Flr), flr: true, ..Written::default() };
                }
                through(reg, write, passed)
            }
            Some(Register::Owned(owned, inner)) => {
                let effects = match owned {
                    Owned::Power => self.power.as_mut().map_or(Effects::NONE, |power| power.write(inner, write)),
                    Owned::Msi => self.msi.as_mut().map_or(Effects::NONE, |msi| msi.write(inner, write)),
                    Owned::Msix => self.msix.as_mut().map_or(Effects::NONE, |msix| msix.write(inner, write)),
                };
                let command = owned == Owned::Power && !effects.is_none();
                Written { effects, command, ..Written::default() }
            }
        }
    }

    fn write_header(&mut self, reg: Dword, write: DwordWrite) -> Written {
        match reg.offset() {
            header::COMMAND_STATUS => {
                let before = (self.command, self.host_command());
                let [low, high, ..] = write.apply(self.command.into(), COMMAND.into()).to_le_bytes();
                self.command = u16::from_le_bytes([low, high]);
                let changed = before.0 ^ self.command;
                let windows = when(changed & command::MEMORY_SPACE != 0, Effects::WINDOWS);
                let effects = windows.and(when(changed & command::BUS_MASTER != 0, Effects::MESSAGES));
                let errors = Passed { fixed: 0, read: STATUS_ERRORS, write: STATUS_ERRORS, clear: STATUS_ERRORS };
                let command = before.1 != self.host_command();
                Written { effects, command, ..through(reg, write, errors) }
            }
            header::CACHE_LINE_HEADER_TYPE => {
                let [size, ..] = write.apply(self.cache_line_size.into(), 0xff).to_le_bytes();
                self.cache_line_size = size;
                Written::default()
            }
            header::INTERRUPT => {
                if let Some(line) = &mut self.line {
                    let [value, ..] = write.apply(line.value.into(), 0xff).to_le_bytes();
                    line.value = value;
                }
                Written::default()
            }
            offset @ header::BAR0..=header::BAR5 => {
                let changed = self.bars.write((offset - header::BAR0) / 4, write);
                let windows = changed && self.command & command::MEMORY_SPACE != 0;
                Written { effects: when(windows, Effects::WINDOWS), ..Written::default() }
            }
            _ => Written::default(),
        }
    }

    /// Returns to the state of power-on.
    pub(super) fn reset(&mut self, kind: ResetKind) -> Effects {
        self.command = 0;
        self.cache_line_size = 0;
        self.bars.reset();
        self.power.iter_mut().for_each(Power::reset);
        self.msi.iter_mut().for_each(Msi::reset);
        self.msix.iter_mut().for_each(Msix::reset);
        self.line.iter_mut().for_each(|line| line.value = line.at_reset);
        let mut effects = Effects::WINDOWS.and(Effects::MESSAGES);
        effects.reset = Some(kind);
        effects
    }
}

fn when(happened: bool, effects: Effects) -> Effects {
    if happened { effects } else { Effects::NONE }
}

/// A write whose bits in `passed` go to the host, if there are any.
fn through(reg: Dword, write: DwordWrite, passed: Passed) -> Written {
    // A 0 leaves write-1-to-clear bits unchanged.
    let clears = write.value() & passed.clear != 0;
    let writes = clears || write.mask() & passed.write & !passed.clear != 0;
    Written { through: writes.then_some(Through { reg, write, passed }), ..Written::default() }
}

/// The memory BARs. I/O BARs are not shown; those of less than 128 bytes are rounded up.
fn kinds(sizes: [u64; 6], dword: impl Fn(u16) -> u32) -> Vec<(BarIndex, BarKind)> {
    let mut kinds = Vec::new();
    let mut registers = (header::BAR0..).step_by(4).zip(BarIndex::ALL).zip(sizes);
    while let Some(((offset, index), size)) = registers.next() {
        let value = dword(offset);
        let is_64 = value & bar::MEMORY64 != 0;
        if size == 0 || value & 1 != 0 {
            continue;
        }
        let size = size.max(SMALLEST_BAR);
        let kind = match u32::try_from(size) {
            Ok(size) if !is_64 => BarKind::Memory32 { size },
            _ => BarKind::Memory64 { size, prefetchable: value & bar::PREFETCHABLE != 0 },
        };
        kinds.push((index, kind));
        if is_64 {
            // Skip the upper half of the address.
            registers.next();
        }
    }
    kinds
}

/// The shape of the MSI-X capability at `offset`.
fn msix_shape(offset: u16, dword: impl Fn(u16) -> u32) -> MsixShape {
    use pci::spec::msix;

    let place = |at: u16| {
        let value = dword(offset + at);
        let bar = BarIndex::ALL.get((value & 0b111) as usize).copied();
        // BARs 6 and 7 do not exist; the last BAR without room for a table stands for them.
        let offset = if bar.is_some() { value & !0b111 } else { !0b111 };
        (bar.unwrap_or(BarIndex::ALL[5]), u64::from(offset))
    };
    let [.., low, high] = dword(offset + msix::CONTROL).to_le_bytes();
    let vectors = (u16::from_le_bytes([low, high]) & (msix::MAX_VECTORS - 1)) + 1;
    MsixShape { vectors, table: place(msix::TABLE), pba: place(msix::PBA) }
}

#[cfg(test)]
mod tests;
