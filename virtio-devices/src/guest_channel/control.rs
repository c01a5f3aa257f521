//! Control messages (`virtio 1.4 §5.3.6.2`, `struct virtio_console_control`), and those that the driver is owed.

/// There are several ports, and control queues (`virtio 1.4 §5.3.3`, `VIRTIO_CONSOLE_F_MULTIPORT`).
pub(super) const F_MULTIPORT: u32 = 1;
/// Number of ports.
pub(super) const PORTS: u8 = 2;
/// Length of a message without a name.
pub(super) const LEN: usize = 8;

// The events.
const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

/// A message of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// The driver found the device, and asks for its ports.
    DeviceReady,
    /// The driver has made the port.
    PortReady(u8),
    /// A program opened the port, or closed it.
    PortOpen(u8, bool),
    /// The driver could not make the device or the port.
    Failed,
    /// Anything else.
    Unknown,
}

impl Told {
    /// Reads a message.
    pub(super) fn of(bytes: [u8; LEN]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        let (id, event, value) =
            (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]));
        let port = u8::try_from(id).ok().filter(|port| *port < PORTS);
        match (event, port, value) {
            (DEVICE_READY, _, 1) => Self::DeviceReady,
            (PORT_READY, Some(port), 1) => Self::PortReady(port),
            (PORT_OPEN, Some(port), 0 | 1) => Self::PortOpen(port, value == 1),
            (DEVICE_READY, _, 0) | (PORT_READY, Some(_), 0) => Self::Failed,
            _ => Self::Unknown,
        }
    }
}

/// Messages that the driver is owed, one bit for each, in the order in which they are sent. A driver that asks again
/// before it has them is owed no more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Owed(u8);

/// Port and event of each bit. Linux needs a port's name before it is open.
const ORDER: [(u8, u16); 6] =
    [(0, PORT_ADD), (1, PORT_ADD), (0, PORT_NAME), (0, PORT_OPEN), (1, PORT_NAME), (1, PORT_OPEN)];

impl Owed {
    /// The messages with these bits; `None` if there are no such messages.
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        (bits >> ORDER.len() == 0).then_some(Self(bits))
    }

    /// The messages as bits.
    pub(super) const fn bits(self) -> u8 {
        self.0
    }

    /// Owes all ports.
    pub(super) fn ports(&mut self) {
        self.owe(|_, event| event == PORT_ADD);
    }

    /// Owes the name and the state of a port.
    pub(super) fn port(&mut self, port: u8) {
        self.owe(|of, event| of == port && event != PORT_ADD);
    }

    fn owe(&mut self, is_owed: impl Fn(u8, u16) -> bool) {
        for (bit, (port, event)) in ORDER.into_iter().enumerate() {
            self.0 |= u8::from(is_owed(port, event)) << bit;
        }
    }

    /// The next message, for ports with these names.
    pub(super) fn next(self, names: [&str; 2]) -> Option<Vec<u8>> {
        let (port, event) = *ORDER.get(self.0.trailing_zeros() as usize)?;
        let value: u16 = 1;
        let mut message = u32::from(port).to_le_bytes().to_vec();
        message.extend(event.to_le_bytes());
        message.extend(value.to_le_bytes());
        if event == PORT_NAME {
            message.extend(names.get(usize::from(port)).copied().unwrap_or_default().as_bytes());
        }
        Some(message)
    }

    /// Notes that the next message was sent.
    pub(super) fn sent(&mut self) {
        self.0 &= self.0.wrapping_sub(1);
    }
}
