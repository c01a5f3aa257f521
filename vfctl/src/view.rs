//! VFs as the program prints them: the host's answer, and the guest's own view of the function.

use serde::Serialize;
use vfctl::Roots;
use vfctl::function::Function;
use vm_api::channel::{PfState, VfState};

/// A PF with its enabled VFs.
#[derive(Debug, Serialize)]
pub(crate) struct PfView {
    /// PCI address.
    pub pf: String,
    /// Network interface, if this network namespace has it.
    pub netdev: Option<String>,
    /// Limits as in `--net guest_control=`.
    pub allowed: Vec<String>,
    /// VFs in the order of their indices.
    pub vfs: Vec<VfView>,
}

/// A VF.
#[derive(Debug, Serialize)]
pub(crate) struct VfView {
    /// The host's answer.
    #[serde(flatten)]
    pub state: VfState,
    /// PCI address of the PF.
    pub pf: Option<String>,
    /// Network interface of the PF.
    #[serde(skip)]
    pub pf_netdev: Option<String>,
    /// Network interface, if this network namespace has it.
    pub netdev: Option<String>,
    /// Driver.
    pub driver: Option<String>,
}

impl PfView {
    /// The view of a PF with these VFs.
    pub(crate) fn new(roots: &Roots, pf: PfState, vfs: Vec<VfState>) -> Self {
        let netdev = Function::at(roots, &pf.pf).and_then(|pf| pf.netdev());
        let vfs = vfs.into_iter().map(|state| VfView::new(roots, state)).collect();
        Self { pf: pf.pf, netdev, allowed: pf.allowed, vfs }
    }
}

impl VfView {
    /// The view of a VF.
    pub(crate) fn new(roots: &Roots, state: VfState) -> Self {
        let function = Function::at(roots, &state.vf);
        let pf = function.as_ref().and_then(Function::pf);
        let pf_netdev = pf.as_ref().and_then(|pf| Function::at(roots, pf)?.netdev());
        let (netdev, driver) = function.map(|vf| (vf.netdev(), vf.driver())).unwrap_or_default();
        Self { state, pf, pf_netdev, netdev, driver }
    }

    /// Name for people, by which all commands find the VF: `eth0/3`.
    pub(crate) fn name(&self) -> String {
        match self.pf_netdev.as_deref().or(self.pf.as_deref().map(short)) {
            Some(pf) => format!("{pf}/{}", self.state.index),
            None => short(&self.state.vf).to_owned(),
        }
    }
}

/// An address without the segment if that is 0.
pub(crate) fn short(address: &str) -> &str {
    address.strip_prefix("0000:").unwrap_or(address)
}
