//! A PF and its VFs as one device (`PCIe 6.2 §9`).
//!
//! All VFs are built at the start; VF Enable makes them visible. The PF's registers determine at each access which VFs
//! exist; nothing else is stored. A VF that is not visible is in its reset state.
//!
//! - A routing ID belongs to the PF, to an existing VF, or to no function, which reads as all-ones and ignores writes
//!   (`§9.2.1.2`).
//! - A window of a VF BAR has a slice for each existing VF, and is decoded while VF Enable and VF MSE are set and the
//!   PF is in D0 (`§9.3.3.3`).
//! - A VF is reset when VF Enable is cleared, by a write or by a reset of the PF (`§9.2.2`, `§9.3.3.3.1`). Setting VF
//!   Enable resets nothing.
//! - A VF can be removed by surprise, for tests of drivers: it reads as all-ones until VF Enable is cleared.
//! - A VF follows its PF into D3hot and back, keeping its registers (`§9.6`). It has its own Bus Master Enable,
//!   independent of the PF's (`§9.3.4.1.3`).

use std::collections::BTreeSet;

use crate::spec::{ALL_ONES, header};
use crate::{
    BarIndex, BarKind, ConfigSpace, Device, Dword, DwordWrite, Effects, Function, MsixError, Outcome, Reach, ResetKind,
    Rid, Sriov, SriovError, SriovShape, VfChange, VfIndex, VfPlacement, Window, WindowId,
};

/// Reason why functions cannot form a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PfError {
    /// The intended PF has no SR-IOV capability.
    #[error("the PF has no SR-IOV capability; build its configuration space with Role::Pf")]
    NotPf,
    /// The number of VFs is not TotalVFs.
    #[error("{vfs} VFs for an SR-IOV capability with TotalVFs {total_vfs}; give as many VFs as TotalVFs")]
    Count {
        /// Number of VFs passed.
        vfs: usize,
        /// TotalVFs.
        total_vfs: u16,
    },
    /// A VF was not built as one ([`Role::Vf`](crate::Role::Vf)).
    #[error("VF {0} has the configuration space of a different kind of function; build it with Role::Vf")]
    NotVf(VfIndex),
    /// A VF has another class than its PF (`PCIe 6.2 §9.3.4.1.6`).
    #[error("VF {0} has a different class code than its PF; give both the same Identity::class")]
    Class(VfIndex),
    /// A VF has another Subsystem Vendor ID than its PF (`PCIe 6.2 §9.3.4.1`).
    #[error("VF {0} has another Subsystem Vendor ID than its PF; give both the same Identity::subsystem_vendor")]
    SubsystemVendor(VfIndex),
    /// A VF has another Device/Port Type or link than its PF, or only one of them has ARI.
    #[error("VF {0} is attached in another way than its PF; give both the same PortType")]
    Port(VfIndex),
    /// The MSI-X table or PBA of a VF does not fit the VF BARs.
    #[error("VF {index} does not fit the VF BARs of its PF: {error}; give its ConfigShape the bars of SriovShape")]
    Msix {
        /// The VF.
        index: VfIndex,
        /// Fault of the VFs' MSI-X.
        error: MsixError,
    },
    /// VFs have no routing IDs, or unreachable ones, at this address of the PF.
    #[error("PF at {rid}: {error}")]
    RoutingIds {
        /// The PF's routing ID.
        rid: Rid,
        /// Fault of the SR-IOV capability.
        error: SriovError,
    },
}

impl SriovShape {
    /// The SR-IOV capability of the PF at `pf`, which depends on no other PF, with its VFs at `vfs` and `bars` as VF
    /// BARs.
    ///
    /// `pf` is one of functions 0 to 7. For an Endpoint with a higher function number, Function Dependency Link must be
    /// set to [`Rid::devfn`].
    pub fn new(pf: Rid, vfs: VfPlacement, vf_device_id: u16, bars: Vec<(BarIndex, BarKind)>) -> Self {
        let VfPlacement { total_vfs, first_vf_offset, vf_stride } = vfs;
        let function_dependency_link = pf.function();
        Self { total_vfs, first_vf_offset, vf_stride, vf_device_id, bars, function_dependency_link }
    }
}

/// A PF and its VFs.
#[derive(Debug)]
pub struct PfWithVfs<F> {
    rid: Rid,
    pf: F,
    /// TotalVFs of them.
    vfs: Vec<F>,
    /// The VFs that were removed, until VF Enable is cleared.
    removed: BTreeSet<u16>,
}

/// Checks that `vf` can be VF `index` of the PF `pf`, whose SR-IOV capability is `sriov`.
fn check_vf(pf: &ConfigSpace, sriov: &Sriov, index: VfIndex, vf: &ConfigSpace) -> Result<(), PfError> {
    let class = |space: &ConfigSpace| space.read(Dword::containing(header::CLASS_REVISION)) >> 8;
    let subsystem_vendor = |space: &ConfigSpace| space.read(Dword::containing(header::SUBSYSTEM)) & 0xffff;
    // The PF alone defines the VFs' routing IDs with ARI, and each function has its own ACS.
    let port = |space: &ConfigSpace| space.port().endpoint().map(|endpoint| (endpoint.link, endpoint.ari.is_some()));
    if !vf.is_vf() {
        return Err(PfError::NotVf(index));
    }
    if class(vf) != class(pf) {
        return Err(PfError::Class(index));
    }
    if subsystem_vendor(vf) != subsystem_vendor(pf) {
        return Err(PfError::SubsystemVendor(index));
    }
    if port(vf) != port(pf) {
        return Err(PfError::Port(index));
    }
    let msix = vf.msix().map_or(Ok(()), |msix| msix.shape().check(sriov.bars()));
    msix.map_err(|error| PfError::Msix { index, error })
}

/// An existing function.
enum Target {
    Pf,
    Vf(VfIndex),
}

impl<F: Function> PfWithVfs<F> {
    /// Combines the PF at `rid` and its VFs, in order, all in their power-on state.
    ///
    /// # Errors
    ///
    /// Fails if these functions cannot form a PF and its VFs.
    pub fn new(rid: Rid, pf: F, vfs: Vec<F>) -> Result<Self, PfError> {
        let sriov = pf.config().sriov().ok_or(PfError::NotPf)?;
        let total_vfs = sriov.total_vfs();
        if vfs.len() != usize::from(total_vfs) {
            return Err(PfError::Count { vfs: vfs.len(), total_vfs });
        }
        sriov.check_rid(rid).map_err(|error| PfError::RoutingIds { rid, error })?;
        for (index, vf) in (0..).map(VfIndex).zip(&vfs) {
            check_vf(pf.config(), sriov, index, vf.config())?;
        }
        Ok(Self { rid, pf, vfs, removed: BTreeSet::new() })
    }

    /// The function at `rid` alone, without VFs: a device that could have been a PF. Its configuration space must have
    /// no SR-IOV capability, since there are no VFs that it could enable.
    ///
    /// # Errors
    ///
    /// [`PfError::Count`] if it has the capability.
    pub fn without_vfs(rid: Rid, function: F) -> Result<Self, PfError> {
        match function.config().sriov() {
            Some(sriov) => Err(PfError::Count { vfs: 0, total_vfs: sriov.total_vfs() }),
            None => Ok(Self { rid, pf: function, vfs: Vec::new(), removed: BTreeSet::new() }),
        }
    }

    /// The PF's routing ID.
    pub fn rid(&self) -> Rid {
        self.rid
    }

    /// Moves the PF, and with it its VFs, to another bus: an Endpoint takes its bus number from the last configuration
    /// write to it (`§2.2.6.2`). Every function then has another routing ID.
    ///
    /// Software may choose a bus from which routing IDs of VFs wrap past `FF:1f.7`. They are still unique then, and no
    /// port forwards requests to those that wrapped.
    pub fn set_bus(&mut self, bus: u8) -> Outcome<F::Stopping> {
        let rid = Rid::from_bus_devfn(bus, self.rid.devfn());
        if rid == self.rid {
            return Outcome::none();
        }
        self.rid = rid;
        // Messages carry the routing ID.
        Effects::QUEUES.and(Effects::MESSAGES).into()
    }

    /// The PF.
    pub fn pf(&self) -> &F {
        &self.pf
    }

    /// The PF, for changes by the host. The caller must not replace it or write its registers.
    pub fn pf_mut(&mut self) -> &mut F {
        &mut self.pf
    }

    /// The VF `index`, existing or not; `None` from TotalVFs on.
    pub fn vf(&self, index: VfIndex) -> Option<&F> {
        self.vfs.get(usize::from(index.0))
    }

    /// The VF `index`, as [`Self::pf_mut`].
    pub fn vf_mut(&mut self, index: VfIndex) -> Option<&mut F> {
        self.vfs.get_mut(usize::from(index.0))
    }

    /// All VFs, existing or not, in order.
    pub fn vfs(&self) -> &[F] {
        &self.vfs
    }

    /// The VFs that exist now.
    pub fn visible(&self) -> impl Iterator<Item = (VfIndex, &F)> {
        let vfs = (0..self.num_visible()).map(VfIndex).zip(&self.vfs);
        vfs.filter(|(index, _)| !self.removed.contains(&index.0))
    }

    /// Makes the next `count` writes that would set VF Enable leave it clear, as a device does that fails, for tests of
    /// drivers. 0 ends this. Resets do not change the number, and it is not saved.
    pub fn fail_enables(&mut self, count: u32) {
        if let Some(sriov) = self.pf.config_mut().sriov_mut() {
            sriov.fail_enables(count);
        }
    }

    /// Removes VF `index` as if it had broken (`§6.7.3`), for tests of drivers: it is reset, reads as all-ones and
    /// ignores writes. Clearing VF Enable ends this, and it is not saved. `None` if the VF does not exist.
    pub fn remove_vf(&mut self, index: VfIndex) -> Option<Outcome<F::Stopping>> {
        if index.0 >= self.num_visible() || self.removed.contains(&index.0) {
            return None;
        }
        let powered = self.is_powered();
        let outcome = self.vf_mut(index)?.reset(ResetKind::Conventional, powered);
        self.removed.insert(index.0);
        Some(outcome.within(Reach::Device))
    }

    /// True if VF `index` was removed, and VF Enable has not been cleared since.
    pub fn is_removed(&self, index: VfIndex) -> bool {
        self.removed.contains(&index.0)
    }

    /// The PF and all VFs, existing or not.
    pub fn functions(&self) -> impl Iterator<Item = &F> {
        std::iter::once(&self.pf).chain(&self.vfs)
    }

    /// The PF and all VFs, as [`Self::pf_mut`].
    pub fn functions_mut(&mut self) -> impl Iterator<Item = &mut F> {
        std::iter::once(&mut self.pf).chain(&mut self.vfs)
    }

    /// The SR-IOV capability; `None` [without VFs](Self::without_vfs).
    pub fn sriov(&self) -> Option<&Sriov> {
        self.pf.config().sriov()
    }

    /// Number of VFs that exist now.
    pub fn num_visible(&self) -> u16 {
        self.sriov().map_or(0, Sriov::num_visible)
    }

    /// True if the PF is in D0, and with it its VFs.
    pub fn is_powered(&self) -> bool {
        self.pf.config().is_d0()
    }

    /// The offset of the slice of VF `index` in the window of VF BAR `bar`, with the present System Page Size. `None`
    /// if there is no such VF or VF BAR.
    pub fn slice(&self, bar: BarIndex, index: VfIndex) -> Option<u64> {
        self.vf(index)?;
        self.sriov()?.bars().aperture(bar)?.checked_mul(index.0.into())
    }

    /// The function that exists at `rid` now.
    pub fn function(&self, rid: Rid) -> Option<&F> {
        match self.target(rid)? {
            Target::Pf => Some(&self.pf),
            Target::Vf(index) => self.vf(index),
        }
    }

    /// The VF that exists at `rid` now.
    pub fn vf_index(&self, rid: Rid) -> Option<VfIndex> {
        match self.target(rid)? {
            Target::Pf => None,
            Target::Vf(index) => Some(index),
        }
    }

    fn target(&self, rid: Rid) -> Option<Target> {
        if rid == self.rid {
            return Some(Target::Pf);
        }
        let index = self.sriov()?.vf_index(self.rid, rid).filter(|index| !self.is_removed(*index));
        index.map(Target::Vf)
    }

    /// The VF whose slice of VF BAR `bar` is at `offset` of its window, and the offset in the slice; `None` while the
    /// window is not decoded.
    pub fn locate(&self, bar: BarIndex, offset: u64) -> Option<(VfIndex, u64)> {
        let sriov = self.sriov().filter(|sriov| sriov.vf_mse() && self.is_powered())?;
        sriov.locate(bar, offset).filter(|(index, _)| !self.is_removed(*index))
    }

    /// Makes a change of the PF, and updates its VFs accordingly.
    fn change_pf(&mut self, change: impl FnOnce(&mut F) -> Outcome<F::Stopping>) -> Outcome<F::Stopping> {
        let was_powered = self.is_powered();
        let mut outcome = change(&mut self.pf);
        let powered = self.is_powered();
        let concerns_vfs = outcome.effects.vfs.is_some() || powered != was_powered;
        let reach = if concerns_vfs { Reach::Device } else { Reach::Function(self.rid) };
        // The PF's effects contain the changes for the VFs: they were disabled, or all entered or left D3hot.
        if let Some(VfChange::Disabled { num_vfs }) = outcome.effects.vfs {
            self.removed.clear();
            let gone = self.vfs.iter_mut().take(usize::from(num_vfs));
            outcome.stopping.extend(gone.flat_map(|vf| vf.reset(ResetKind::Conventional, powered).stopping));
        }
        if powered != was_powered {
            let visible = usize::from(self.num_visible());
            let following = self.vfs.iter_mut().take(visible);
            let woken = Effects::QUEUES.and(Effects::MESSAGES);
            outcome.stopping.extend(following.flat_map(|vf| vf.changed(woken, powered).stopping));
        }
        outcome.within(reach)
    }

    /// Makes a change of a VF. It affects no other function.
    fn change_vf(
        &mut self,
        index: VfIndex,
        change: impl FnOnce(&mut F, bool) -> Outcome<F::Stopping>,
    ) -> Outcome<F::Stopping> {
        let powered = self.is_powered();
        let rid = self.sriov().and_then(|sriov| sriov.vf_rid(self.rid, index));
        match (self.vfs.get_mut(usize::from(index.0)), rid) {
            (Some(vf), Some(rid)) => change(vf, powered).within(Reach::Function(rid)),
            _ => Outcome::none(),
        }
    }
}

impl<F: Function> Device for PfWithVfs<F> {
    type Stopping = F::Stopping;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.function(rid).map_or(ALL_ONES, |function| function.config_read(reg))
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome<F::Stopping> {
        match self.target(rid) {
            Some(Target::Pf) => self.change_pf(|pf| pf.config_write(reg, write, true)),
            Some(Target::Vf(index)) => self.change_vf(index, |vf, powered| vf.config_write(reg, write, powered)),
            None => Outcome::none(),
        }
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        match window {
            WindowId::Bar(bar) => self.pf.bar_read(bar, offset, data),
            WindowId::VfBar(bar) => {
                let place = self.locate(bar, offset);
                match place.and_then(|(index, offset)| Some((self.vf_mut(index)?, offset))) {
                    Some((vf, offset)) => vf.bar_read(bar, offset, data),
                    None => data.fill(0xff),
                }
            }
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome<F::Stopping> {
        match window {
            WindowId::Bar(bar) => self.change_pf(|pf| pf.bar_write(bar, offset, data, true)),
            WindowId::VfBar(bar) => match self.locate(bar, offset) {
                Some((index, offset)) => self.change_vf(index, |vf, powered| vf.bar_write(bar, offset, data, powered)),
                None => Outcome::none(),
            },
        }
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.is_powered() && self.function(rid).is_some_and(|function| function.config().bus_master())
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.pf.config().windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome<F::Stopping> {
        self.change_pf(|pf| pf.reset(kind, true)).within(Reach::Device)
    }
}

#[cfg(test)]
mod tests;
