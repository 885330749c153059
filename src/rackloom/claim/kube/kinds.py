"""The resource types that Rackloom reads or writes."""

from rackloom.claim.kube.api import Kind

POD = Kind("", "v1", "Pod", "pods", namespaced=True)
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
SECRET = Kind("", "v1", "Secret", "secrets", namespaced=True)
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps", namespaced=True)
SERVICE = Kind("", "v1", "Service", "services", namespaced=True)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts", namespaced=True)
EVENT = Kind("", "v1", "Event", "events", namespaced=True)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments", namespaced=True)
DAEMON_SET = Kind("apps", "v1", "DaemonSet", "daemonsets", namespaced=True)
JOB = Kind("batch", "v1", "Job", "jobs", namespaced=True)
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", namespaced=True)
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", namespaced=True)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases", namespaced=True)
RESOURCE_SLICE = Kind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices", namespaced=False)
RESOURCE_CLAIM = Kind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims", namespaced=True)
RESOURCE_CLAIM_TEMPLATE = Kind(
    "resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates", namespaced=True
)
DEVICE_CLASS = Kind("resource.k8s.io", "v1", "DeviceClass", "deviceclasses", namespaced=False)
CRD = Kind(
    "apiextensions.k8s.io",
    "v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
MUTATING_WEBHOOK = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    namespaced=False,
)
VALIDATING_WEBHOOK = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    namespaced=False,
)
COMPUTE_DOMAIN = Kind("resource.nvidia.com", "v1beta1", "ComputeDomain", "computedomains", namespaced=True)
COMPUTE_DOMAIN_CLIQUE = Kind(
    "resource.nvidia.com", "v1beta1", "ComputeDomainClique", "computedomaincliques", namespaced=True
)
GANG_PLAN = Kind("rackloom.dev", "v1alpha1", "GangPlan", "gangplans", namespaced=True)
