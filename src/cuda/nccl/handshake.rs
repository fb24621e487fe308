//! Mutual proof by the two ends of a connection that they know the job's secret.
//!
//! Each sends a random nonce and an HMAC-SHA256 over both nonces, the world size, the rank and the job. A recorded
//! proof is worthless on another connection, because the other end's nonce is new there. What follows on the connection
//! is neither encrypted nor signed: a secret keeps out strangers who can connect, not one who alters the ranks' own
//! traffic.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::cuda::nccl::secret::Secret;
use crate::error::{Error, Result};

/// A random number that is used for one connection.
pub(super) type Nonce = [u8; 32];
/// An HMAC-SHA256.
pub(super) type Proof = [u8; 32];

/// Maker of a proof. Each role has a label of its own, so that a proof cannot be sent back to its maker.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// Rank 0, which listens.
    Host,
    /// Any other rank, which connects.
    Guest,
}

/// Subject of a proof: one connection of one rank of one job.
#[derive(Clone, Copy)]
pub(super) struct Transcript<'a> {
    pub(super) job: &'a str,
    pub(super) world_size: u32,
    pub(super) rank: u32,
    pub(super) host: &'a Nonce,
    pub(super) guest: &'a Nonce,
}

impl Transcript<'_> {
    pub(super) fn prove(&self, secret: &Secret, role: Role) -> Proof {
        self.code(secret, role).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    pub(super) fn verify(&self, secret: &Secret, role: Role, proof: &Proof) -> bool {
        self.code(secret, role).verify_slice(proof).is_ok()
    }

    fn code(&self, secret: &Secret, role: Role) -> Hmac<Sha256> {
        let mut key = [0; 64];
        key[..32].copy_from_slice(&Sha256::digest(secret.bytes()));
        let label: &[u8] = match role {
            Role::Host => b"instep rank 0",
            Role::Guest => b"instep member",
        };
        // Every part but the last has a fixed length, so two transcripts never have the same bytes.
        Hmac::<Sha256>::new(&key.into())
            .chain_update(label)
            .chain_update(self.host)
            .chain_update(self.guest)
            .chain_update(self.world_size.to_le_bytes())
            .chain_update(self.rank.to_le_bytes())
            .chain_update(self.job)
    }
}

/// Returns a new nonce from the operating system.
pub(super) fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| {
        let wrong = format_args!("the operating system gives no random numbers ({error})");
        Error::unsupported("INSTEP_JOB_SECRET", wrong, "unset it, or repair the system's random source")
    })?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text).unwrap()
    }

    #[test]
    fn a_proof_is_the_hmac_that_another_implementation_computes() {
        // Python: hmac.new(sha256(b"correct horse battery").digest(), b"instep rank 0" + bytes([1]) * 32
        //         + bytes([2]) * 32 + struct.pack("<II", 4, 3) + b"a job", "sha256").hexdigest()
        let transcript = Transcript { job: "a job", world_size: 4, rank: 3, host: &[1; 32], guest: &[2; 32] };
        let proof = transcript.prove(&secret("correct horse battery"), Role::Host);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "a9f34456a43bec559cc3639d28f66b0223cde634bb806c1214638156fba9395e");
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_role_and_one_transcript() {
        let own = secret("correct horse battery");
        let transcript = Transcript { job: "a job", world_size: 4, rank: 3, host: &[1; 32], guest: &[2; 32] };
        let proof = transcript.prove(&own, Role::Guest);
        assert!(transcript.verify(&own, Role::Guest, &proof));
        assert!(!transcript.verify(&secret("incorrect horse battery"), Role::Guest, &proof));
        assert!(!transcript.verify(&own, Role::Host, &proof));
        let others = [
            Transcript { job: "a jog", ..transcript },
            Transcript { job: "a job ", ..transcript },
            Transcript { world_size: 5, ..transcript },
            Transcript { rank: 2, ..transcript },
            Transcript { host: &[3; 32], ..transcript },
            Transcript { guest: &[3; 32], ..transcript },
            Transcript { host: &[2; 32], guest: &[1; 32], ..transcript },
        ];
        for other in others {
            assert!(!other.verify(&own, Role::Guest, &proof));
        }
    }

    #[test]
    fn nonces_differ() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
