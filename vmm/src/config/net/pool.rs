//! A NIC and its VFs, each with its effective settings.

use crate::config::net::guest_control;
use crate::config::net::nic::Nic;
use crate::config::net::switch;
use crate::config::net::uplink_rate;
use crate::config::net::vf_ranges;
use crate::config::net::x550;
use crate::config::subject::Subject;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::MacChoice;
use vm_api::config::net::{NetConfig, VfConfig};
use vm_api::config::option::Options as _;
use vm_api::config::vdpa::VdpaConfig;

/// A NIC and all its VFs, including those that the configuration does not mention.
pub(crate) struct Pool<'a> {
    /// The option that describes it: `--net` or `--vdpa`.
    pub option: &'static str,
    /// The NIC's name, given by the user or chosen.
    pub id: String,
    /// The settings of the NIC or PF.
    pub pf: &'a NetConfig,
    /// The effective settings of each VF, by index: its own over the PF's. None for those of an X550.
    pub vfs: Vec<NetConfig>,
    subject: Subject,
}

impl<'a> Pool<'a> {
    /// Merges the settings of the VFs.
    ///
    /// # Errors
    ///
    /// Fails if a VF is not reserved or given twice, or VFs differ in shape.
    pub(crate) fn new(
        option: &'static str,
        pf: &'a NetConfig,
        id: String,
        subject: Subject,
    ) -> Result<Self, ConfigError> {
        if x550::model(pf).is_some() {
            // Its VFs are the guest's.
            return Ok(Self { option, id, pf, vfs: Vec::new(), subject });
        }
        let mut given = vec![None; usize::from(pf.sriov_vfs)];
        for vf in &pf.vfs {
            let fail = |problem| ConfigError::new(Subject::vf(&id, vf.index).bare(), problem);
            // Ranges have been expanded.
            for index in vf.index.among(&id, pf.sriov_vfs).map_err(|what| fail(Problem::Value(what)))? {
                let slot = given.get_mut(usize::from(index)).filter(|slot| slot.is_none());
                *slot.ok_or_else(|| fail(Problem::Conflict(vf_ranges::given_twice(&id, index))))? = Some(vf);
            }
        }
        let queues = vf_queues(pf, &id)?;
        let unsaid = VfConfig::default();
        let vfs = given.into_iter().map(|vf| vf.unwrap_or(&unsaid).over(pf, queues)).collect();
        Ok(Self { option, id, pf, vfs, subject })
    }

    /// Name of the NIC, or of one of its VFs, in error messages.
    pub(crate) fn subject(&self, vf: Option<u16>) -> Subject {
        vf.map_or_else(|| self.subject.clone(), |index| Subject::vf(&self.id, index))
    }

    /// The NIC or PF, then the VFs by index.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (Option<u16>, &NetConfig)> {
        std::iter::once((None, self.pf)).chain((0..).map(Some).zip(&self.vfs))
    }

    /// The VFs whose MAC address is derived from the PF's.
    pub(crate) fn vfs_without_mac(&self) -> impl Iterator<Item = u16> + '_ {
        (0..)
            .zip(&self.vfs)
            .filter(|(_, config)| config.mac.and_then(MacChoice::given).is_none())
            .map(|(index, _)| index)
    }

    /// Checks each function by itself, in a VM of `vcpus` vCPUs. VFs without settings of their own are like the PF.
    ///
    /// # Errors
    ///
    /// Fails with the first mistake.
    pub(crate) fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        guest_control::check(self.pf, &self.subject)?;
        if let Some(model) = x550::model(self.pf) {
            return x550::check(model, self.pf, vcpus, &self.subject);
        }
        switch::check(self.pf, vcpus, &self.subject)?;
        let functions: Vec<_> = self.functions().map(|(_, config)| config).collect();
        switch::check_port(self.pf, &functions, &self.subject)?;
        // A vDPA device determines its number of queues; its driver uses no more of them than there are vCPUs.
        let pf_vcpus = if self.option == VdpaConfig::OPTION { u32::MAX } else { vcpus };
        Nic { subject: &self.subject, config: self.pf }.check(pf_vcpus)?;
        for vf in &self.pf.vfs {
            let of_vf = vf.index.one().and_then(|index| Some((index, self.vfs.get(usize::from(index))?)));
            let Some((index, config)) = of_vf else { continue };
            let subject = self.subject(Some(index));
            switch::check_port(config, &functions, &subject)?;
            Nic { subject: &subject, config }.check(vcpus)?;
        }
        uplink_rate::check_sum(&functions, &self.subject)
    }
}

/// The queues of each VF of `pf`: the same for all VFs, as are the sizes of the BARs and of the MSI-X table.
fn vf_queues(pf: &NetConfig, id: &str) -> Result<u16, ConfigError> {
    let mut given = pf.vfs.iter().filter_map(|vf| Some((vf.index, vf.num_queues?)));
    let Some((first, queues)) = given.next() else { return Ok(NetConfig::default().num_queues) };
    match given.find(|(_, other)| *other != queues) {
        Some((index, other)) => {
            let what =
                format!("all VFs of a PF have the same number of queues, and VF {first} has {queues}; make them equal");
            Err(ConfigError::new(Subject::vf(id, index).key("num_queues", other), Problem::Conflict(what)))
        }
        None => Ok(queues),
    }
}
