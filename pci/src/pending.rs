//! The interrupts of a function that wait for a mask to be cleared (`PCIe 6.2 §7.7.2`).

use crate::{ConfigSpace, RestoreError};

/// The pending bits of a function: vectors whose interrupt was raised and could not be sent.
///
/// For a function that sends its messages itself. It raises an interrupt by [`Self::raise`], and sends what waited by
/// [`Self::take_sendable`] when an effect reports that messages may have changed ([`Effects::messages`]). A function
/// whose eventfds are the pending bits needs only [`Msix::bar_read`].
///
/// ```
/// use pci_sriov::{
///     BarIndex, BarKind, ConfigShape, ConfigSpace, Dword, DwordWrite, Identity, MsixShape, PendingBits, Role,
/// };
///
/// let identity = Identity { vendor: 1, device: 2, revision: 0, class: [2, 0, 0], subsystem_vendor: 1, subsystem: 2 };
/// let bar = BarIndex::ALL[0];
/// let mut config = ConfigSpace::new(ConfigShape {
///     bars: vec![(bar, BarKind::Memory32 { size: 0x1000 })],
///     msix: Some(MsixShape { vectors: 2, table: (bar, 0), pba: (bar, 0x800) }),
///     ..ConfigShape::new(identity, Role::Plain)
/// })
/// .unwrap();
/// let mut pending = PendingBits::new(&config);
///
/// // The driver has not enabled MSI-X, so an interrupt waits, and its bit is set in the PBA.
/// assert_eq!(pending.raise(1, &config, true), None);
/// let mut pba = [0; 8];
/// assert!(config.msix_read(bar, 0x800, &mut pba, |vector| pending.contains(vector)));
/// assert_eq!(pba[0], 0b10);
///
/// // The driver sets Bus Master Enable and MSI-X Enable, and fills and unmasks entry 1 of the table.
/// let _ = config.write(Dword::containing(4), DwordWrite::new(4, 0b0011));
/// let msix_enable = DwordWrite::new(0x8000_0000, 0b1100);
/// let _ = config.write(Dword::containing(config.msix_offset().unwrap()), msix_enable);
/// let _ = config.msix_write(bar, 16, &0xfee0_0000_u64.to_le_bytes());
/// let effects = config.msix_write(bar, 24, &0x41_u64.to_le_bytes()).unwrap();
/// assert!(effects.messages);
/// assert_eq!(pending.take_sendable(&config, true), [(0xfee0_0000, 0x41)]);
/// ```
///
/// [`Effects::messages`]: crate::Effects::messages
/// [`Msix::bar_read`]: crate::Msix::bar_read
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingBits {
    /// True for each vector that waits.
    waiting: Box<[bool]>,
}

impl PendingBits {
    /// No interrupt waits. There is a bit for each vector of the function.
    pub fn new(config: &ConfigSpace) -> Self {
        let vectors = config.msix().map_or(0, |msix| msix.vectors());
        Self { waiting: vec![false; usize::from(vectors)].into() }
    }

    /// Raises the interrupt of `vector`. Returns the address and data of the message to send now, or stores that the
    /// interrupt waits. A vector that the function does not have is ignored.
    ///
    /// `powered` is that of [`Function`](crate::Function).
    pub fn raise(&mut self, vector: u16, config: &ConfigSpace, powered: bool) -> Option<(u64, u32)> {
        let waiting = self.waiting.get_mut(usize::from(vector))?;
        let message = config.message(vector).filter(|_| powered);
        *waiting = message.is_none();
        message
    }

    /// Returns the messages that waited and can be sent now, each once, by ascending vector. To be called when
    /// messages may have changed.
    ///
    /// `powered` is that of [`Function`](crate::Function).
    pub fn take_sendable(&mut self, config: &ConfigSpace, powered: bool) -> Vec<(u64, u32)> {
        if !powered {
            return Vec::new();
        }
        let waiting = (0..).zip(&mut self.waiting).filter(|(_, waiting)| **waiting);
        let taken = waiting.filter_map(|(vector, waiting)| {
            let message = config.message(vector)?;
            *waiting = false;
            Some(message)
        });
        taken.collect()
    }

    /// True if the interrupt of `vector` waits.
    pub fn contains(&self, vector: u16) -> bool {
        self.waiting.get(usize::from(vector)).copied().unwrap_or(false)
    }

    /// Discards all interrupts, as a reset of the function does.
    pub fn clear(&mut self) {
        self.waiting.fill(false);
    }

    /// The vectors whose interrupt waits, by ascending number, to be saved.
    pub fn save(&self) -> Vec<u16> {
        (0..).zip(&self.waiting).filter_map(|(vector, waiting)| waiting.then_some(vector)).collect()
    }

    /// Sets the bits to those of `saved`.
    ///
    /// # Errors
    ///
    /// Fails if the function does not have such a vector. Nothing is changed then.
    pub fn restore(&mut self, saved: &[u16]) -> Result<(), RestoreError> {
        let mut waiting = vec![false; self.waiting.len()];
        for vector in saved {
            *waiting.get_mut(usize::from(*vector)).ok_or(RestoreError::Value("pending bits"))? = true;
        }
        self.waiting = waiting.into();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BarIndex, BarKind, ConfigShape, Dword, DwordWrite, Identity, MsixShape, Role};

    const BAR: BarIndex = BarIndex::ALL[0];
    const COMMAND: Dword = Dword::containing(4);

    fn space(msix: Option<MsixShape>) -> ConfigSpace {
        let identity =
            Identity { vendor: 1, device: 2, revision: 0, class: [2, 0, 0], subsystem_vendor: 1, subsystem: 2 };
        let bars = vec![(BAR, BarKind::Memory32 { size: 0x1000 })];
        ConfigSpace::new(ConfigShape { bars, msix, ..ConfigShape::new(identity, Role::Vf) }).unwrap()
    }

    /// A VF with three vectors, whose driver has set Bus Master Enable and MSI-X Enable, and left all vectors masked.
    fn masked() -> ConfigSpace {
        let mut config = space(Some(MsixShape { vectors: 3, table: (BAR, 0), pba: (BAR, 0x800) }));
        let _ = config.write(COMMAND, DwordWrite::full(4));
        control(&mut config, 0x8000);
        config
    }

    fn control(config: &mut ConfigSpace, value: u32) {
        let reg = Dword::containing(config.msix_offset().unwrap());
        let _ = config.write(reg, DwordWrite::full(value << 16));
    }

    fn mask(config: &mut ConfigSpace, vector: u8, mask: u8) {
        let _ = config.msix_write(BAR, u64::from(vector) * 16, &[0, 0, 0, 0xfe]);
        let _ = config.msix_write(BAR, u64::from(vector) * 16 + 8, &[vector, 0, 0, 0, mask, 0, 0, 0]);
    }

    fn pba(config: &ConfigSpace, pending: &PendingBits) -> u8 {
        let mut byte = [0];
        assert!(config.msix_read(BAR, 0x800, &mut byte, |vector| pending.contains(vector)));
        byte[0]
    }

    /// Raises every vector while it is masked; one that is raised again still waits once.
    fn raised(config: &ConfigSpace) -> PendingBits {
        let mut pending = PendingBits::new(config);
        for vector in [0, 1, 2, 1] {
            assert_eq!(pending.raise(vector, config, true), None);
        }
        pending
    }

    #[test]
    fn a_masked_vector_waits_and_is_sent_once_at_its_unmask() {
        let mut config = masked();
        let mut pending = raised(&config);
        assert_eq!((pba(&config, &pending), pending.take_sendable(&config, true)), (0b111, vec![]));
        mask(&mut config, 1, 0);
        assert_eq!(pending.take_sendable(&config, true), [(0xfe00_0000, 1)]);
        assert_eq!((pba(&config, &pending), pending.take_sendable(&config, true)), (0b101, vec![]));
        assert_eq!(pending.raise(1, &config, true), Some((0xfe00_0000, 1)));
        assert_eq!((pending.contains(1), pba(&config, &pending)), (false, 0b101));
    }

    #[test]
    fn the_function_mask_and_msix_enable_hold_every_vector() {
        let mut config = masked();
        let mut pending = raised(&config);
        [0, 2].into_iter().for_each(|vector| mask(&mut config, vector, 0));
        for value in [0xc000, 0] {
            control(&mut config, value);
            assert_eq!((pending.take_sendable(&config, true), pba(&config, &pending)), (vec![], 0b111));
        }
        control(&mut config, 0x8000);
        assert_eq!(pending.take_sendable(&config, true), [(0xfe00_0000, 0), (0xfe00_0000, 2)]);
        assert_eq!(pba(&config, &pending), 0b010);
    }

    /// G18, G43: a VF without Bus Master Enable, or whose PF is in D3hot, sends nothing.
    #[test]
    fn a_vector_waits_for_bus_master_enable_and_power() {
        let mut config = masked();
        mask(&mut config, 0, 0);
        let _ = config.write(COMMAND, DwordWrite::full(0));
        let mut pending = PendingBits::new(&config);
        assert_eq!(pending.raise(0, &config, true), None);
        assert_eq!((pending.take_sendable(&config, true), pba(&config, &pending)), (vec![], 1));
        let _ = config.write(COMMAND, DwordWrite::full(4));
        assert_eq!(pending.take_sendable(&config, false), []);
        assert_eq!(pending.take_sendable(&config, true).len(), 1);
        assert_eq!((pending.raise(0, &config, false), pending.contains(0)), (None, true));
    }

    #[test]
    fn a_vector_that_does_not_exist_is_never_pending() {
        let config = masked();
        let mut pending = raised(&config);
        assert_eq!((pending.raise(3, &config, true), pending.contains(3)), (None, false));
        let without = space(None);
        let mut none = PendingBits::new(&without);
        assert_eq!((none.raise(0, &without, true), none.take_sendable(&without, true)), (None, vec![]));
        assert!(!without.msix_read(BAR, 0, &mut [0; 4], |_| true));
    }

    #[test]
    fn pending_bits_return_from_a_save_and_end_with_a_reset() {
        let config = masked();
        let (mut pending, mut other) = (PendingBits::new(&config), PendingBits::new(&config));
        let _ = (pending.raise(2, &config, true), pending.raise(0, &config, true), other.raise(1, &config, true));
        assert_eq!((pending.save(), other.restore(&pending.save())), (vec![0, 2], Ok(())));
        assert_eq!(other, pending);
        assert_eq!(other.restore(&[1, 3]), Err(RestoreError::Value("pending bits")));
        assert_eq!(other, pending, "unchanged");
        other.clear();
        assert_eq!((other.save(), pba(&config, &other)), (vec![], 0));
    }
}
