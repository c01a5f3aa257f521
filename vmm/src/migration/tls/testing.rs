//! Certificates for tests.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};

pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Writes the files of both sides into `folder`, for a target with these names.
    pub(crate) fn write(&self, folder: &Path, names: &[&str]) {
        fs::write(folder.join("ca-cert.pem"), self.0.pem()).unwrap();
        self.certify(folder, "server", names, false);
        self.certify(folder, "client", &["source"], false);
    }

    /// Writes a certificate and its key.
    pub(crate) fn certify(&self, folder: &Path, name: &str, names: &[&str], is_expired: bool) {
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        if is_expired {
            (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        fs::write(folder.join(format!("{name}-cert.pem")), certificate.pem()).unwrap();
        fs::write(folder.join(format!("{name}-key.pem")), key.serialize_pem()).unwrap();
    }
}
