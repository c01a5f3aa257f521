//! Memory zones that a VM has on another node of its new host.

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::grammar::{list, quote, unquote};
use crate::config::value::Value;

/// A memory zone and the host NUMA node that its memory comes from, instead of the saved one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "ZoneUpdateConfig")]
pub struct ZoneUpdate {
    /// The zone's id.
    pub id: String,
    /// NUMA node of this host.
    #[schema(format = "int32", maximum = 1023)]
    pub host_numa_node: u32,
}

impl Value for Vec<ZoneUpdate> {
    fn parse(text: &str) -> Result<Self, String> {
        let element = |element: &String| {
            let wrong = || "write each as mem0@1: the zone's id, @, a NUMA node of this host".to_string();
            let (id, node) = element.rsplit_once('@').ok_or_else(wrong)?;
            Ok(ZoneUpdate { id: unquote(id)?, host_numa_node: u32::parse(node).map_err(|_| wrong())? })
        };
        list(text)?.iter().map(element).collect()
    }

    fn print(&self) -> Option<String> {
        let one = |update: &ZoneUpdate| format!("{}@{}", quote(&update.id), update.host_numa_node);
        let all: Vec<_> = self.iter().map(one).collect();
        (!all.is_empty()).then(|| format!("[{}]", all.join(",")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zone_updates_read_back_as_they_are_written() {
        let updates = Vec::<ZoneUpdate>::parse("[mem0@1,\"a@b\"@0]").unwrap();
        let update = |id: &str, host_numa_node| ZoneUpdate { id: id.to_string(), host_numa_node };
        assert_eq!(updates, [update("mem0", 1), update("a@b", 0)]);
        assert_eq!(Vec::<ZoneUpdate>::parse(&updates.print().unwrap()), Ok(updates));
        assert_eq!(Vec::<ZoneUpdate>::new().print(), None);
        for wrong in ["[mem0]", "[mem0@]", "[mem0@x]"] {
            assert!(Vec::<ZoneUpdate>::parse(wrong).is_err(), "{wrong}");
        }
    }
}
