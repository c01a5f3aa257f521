//! The virtual CPUs: `--cpus`.

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::affinity;
use crate::config::grammar::list;
use crate::config::value::Value;

/// The virtual CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--cpus")]
#[schema(unsupported = Cpus)]
pub struct CpusConfig {
    /// Number of vCPUs at boot.
    #[option("boot=<number>", bare, default = 1)]
    #[schema(minimum = 1, maximum = 254)]
    pub boot_vcpus: u32,
    /// Maximum number of vCPUs, which can be added and removed while the guest runs. By default the same as boot.
    #[option("max=<number>", default_from = boot_vcpus)]
    #[schema(minimum = 1, maximum = 254)]
    #[schema(about = "Maximum number of vCPUs, which can be added and removed while the guest runs. By default \
                      boot_vcpus.")]
    pub max_vcpus: u32,
    /// Threads per core, cores per die, dies per package, and packages. Their product must be max. By default one
    /// package of single-threaded cores.
    #[option("topology=<threads>:<cores>:<dies>:<packages>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "Shape of the vCPUs. By default one package of single-threaded cores.")]
    pub topology: Option<CpuTopology>,
    /// Show the guest Hyper-V's hypervisor interface, which Windows needs, instead of KVM's.
    #[option("kvm_hyperv=on|off", default = false)]
    pub kvm_hyperv: bool,
    /// Maximum width of guest physical addresses, in bits, 36 to 52. The host's CPU may have fewer.
    #[option("max_phys_bits=<number>", default = 46)]
    #[schema(minimum = 36, maximum = 52)]
    pub max_phys_bits: u8,
    /// Host CPUs that vCPUs may run on. Other vCPUs run on any.
    #[option("affinity=[<vcpu>@[<cpu>,<cpu>-<cpu>,...],...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub affinity: Vec<CpuAffinity>,
    /// Features of the host's CPU that guests have only if named. amx is the only one.
    #[option("features=amx")]
    pub features: CpuFeatures,
    /// Let the guest run VMs itself, if the host allows it.
    #[option("nested=on|off", default = true)]
    pub nested: bool,
    /// Threads that may share a core of the host with a vCPU at the same time: vCPUs of this VM only (vm), none (vcpu),
    /// or any (off). Device threads that a vCPU starts count as part of it.
    #[option("core_scheduling=vm|vcpu|off", default = CoreScheduling::Vm)]
    pub core_scheduling: CoreScheduling,
}

/// The topology of the vCPUs. The product of the four numbers is max_vcpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct CpuTopology {
    /// Threads of a core.
    #[schema(minimum = 1, maximum = 2)]
    pub threads_per_core: u16,
    /// Cores of a die.
    #[schema(minimum = 1, maximum = 254)]
    pub cores_per_die: u16,
    /// Dies of a package.
    #[schema(minimum = 1, maximum = 254)]
    pub dies_per_package: u16,
    /// Packages, also called sockets.
    #[schema(minimum = 1, maximum = 254)]
    pub packages: u16,
}

impl Value for CpuTopology {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "give four numbers: threads of a core, cores of a die, dies of a package, packages".to_string();
        let numbers = text.split(':').map(|number| u16::parse(number).map_err(|_| wrong()));
        match numbers.collect::<Result<Vec<_>, _>>()?[..] {
            [threads_per_core, cores_per_die, dies_per_package, packages] => {
                Ok(Self { threads_per_core, cores_per_die, dies_per_package, packages })
            }
            _ => Err(wrong()),
        }
    }

    fn print(&self) -> Option<String> {
        let Self { threads_per_core, cores_per_die, dies_per_package, packages } = self;
        Some(format!("{threads_per_core}:{cores_per_die}:{dies_per_package}:{packages}"))
    }
}

/// The host CPUs that a vCPU may run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct CpuAffinity {
    /// The vCPU, from 0, below max_vcpus. It is listed once.
    #[schema(maximum = 253)]
    pub vcpu: u32,
    /// The CPUs of the host.
    #[schema(min_items = 1, items(maximum = 1023))]
    pub host_cpus: Vec<u32>,
}

/// A list such as `[0@[0-3],1@[2,5]]`.
impl Value for Vec<CpuAffinity> {
    fn parse(text: &str) -> Result<Self, String> {
        let elements = affinity::parse(text)?.into_iter();
        Ok(elements.map(|(vcpu, host_cpus)| CpuAffinity { vcpu, host_cpus }).collect())
    }

    fn print(&self) -> Option<String> {
        affinity::print(self.iter().map(|affinity| (affinity.vcpu, &affinity.host_cpus[..])))
    }
}

/// Features of the host's CPU that guests have only if named.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
pub struct CpuFeatures {
    /// AMX, the matrix instructions, whose registers take 8 KiB of memory for each vCPU. A VM with AMX does not boot if
    /// the host's CPU lacks it.
    pub amx: bool,
}

impl Value for CpuFeatures {
    fn parse(text: &str) -> Result<Self, String> {
        let mut features = Self::default();
        for name in list(text)? {
            match name.as_str() {
                "amx" => features.amx = true,
                _ => return Err(format!("{name} is not a feature that can be asked for; amx is the only one")),
            }
        }
        Ok(features)
    }

    fn print(&self) -> Option<String> {
        self.amx.then(|| "amx".to_string())
    }
}

/// Threads that may run on a core of the host together with a vCPU (Linux's core scheduling).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[schema(name = "CoreSchedulingMode", shows_default)]
pub enum CoreScheduling {
    /// vCPUs of the same VM.
    #[default]
    Vm,
    /// None.
    Vcpu,
    /// Any.
    Off,
}

impl Value for CoreScheduling {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "vm" => Ok(Self::Vm),
            "vcpu" => Ok(Self::Vcpu),
            "off" => Ok(Self::Off),
            _ => Err("give vm, vcpu or off".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        let word = match self {
            Self::Vm => "vm",
            Self::Vcpu => "vcpu",
            Self::Off => "off",
        };
        Some(word.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> CpusConfig {
        text.parse().unwrap()
    }

    fn refused(text: &str) -> String {
        text.parse::<CpusConfig>().unwrap_err().to_string()
    }

    #[test]
    fn the_command_line_and_json_say_the_same() {
        let text = "boot=2,max=8,topology=2:2:1:2,affinity=[0@[0-2,5],3@[1]],features=amx,nested=off,\
            core_scheduling=vcpu,max_phys_bits=40,kvm_hyperv=on";
        let json = serde_json::json!({
            "boot_vcpus": 2, "max_vcpus": 8, "max_phys_bits": 40, "nested": false, "core_scheduling": "Vcpu",
            "kvm_hyperv": true,
            "topology": {"threads_per_core": 2, "cores_per_die": 2, "dies_per_package": 1, "packages": 2},
            "affinity": [{"vcpu": 0, "host_cpus": [0, 1, 2, 5]}, {"vcpu": 3, "host_cpus": [1]}],
            "features": {"amx": true},
        });
        assert_eq!(serde_json::to_value(read(text)).unwrap(), json);
        assert_eq!(serde_json::from_value::<CpusConfig>(json).unwrap(), read(text));
        assert_eq!(read(&read(text).to_string()), read(text));
    }

    #[test]
    fn cloud_hypervisors_defaults_are_printed() {
        let json = serde_json::json!({
            "boot_vcpus": 1, "max_vcpus": 1, "max_phys_bits": 46, "features": {"amx": false}, "nested": true,
            "core_scheduling": "Vm", "kvm_hyperv": false,
        });
        assert_eq!(serde_json::to_value(CpusConfig::default()).unwrap(), json);
        let defaults =
            "boot=1,nested=on,core_scheduling=vm,max_phys_bits=46,features=,topology=,affinity=[],kvm_hyperv=off";
        assert_eq!(read(defaults), CpusConfig::default());
    }

    #[test]
    fn an_unreadable_topology_is_refused_with_numbers_to_give() {
        let four = "give four numbers: threads of a core, cores of a die, dies of a package, packages";
        for topology in ["2", "1:2:3", "1:2:3:4:5", "a:b:c:d", "1::1:1", "-1:1:1:1", "65536:1:1:1"] {
            assert_eq!(refused(&format!("topology={topology}")), format!("--cpus topology={topology}: {four}"));
        }
        for affinity in ["[0]", "[0@[x]]", "[x@[0]]", "[0@[3-1]]", "[0@[0-99999999]]"] {
            assert!(refused(&format!("affinity={affinity}")).starts_with("--cpus affinity=["), "{affinity}");
        }
        assert_eq!(
            refused("features=[amx,avx]"),
            "--cpus features=[amx,avx]: avx is not a feature that can be asked for; amx is the only one"
        );
        assert_eq!(refused("core_scheduling=all"), "--cpus core_scheduling=all: give vm, vcpu or off");
    }
}
