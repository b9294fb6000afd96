"""Training commands of Megatron-LM and experiments of Primus, as in public scripts."""

from __future__ import annotations

LLAMA3_8B = """
    torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --max-position-embeddings 8192 --init-method-std 0.0134
    --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 --tensor-model-parallel-size 2 --context-parallel-size=2
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --seq-length 8192
    --micro-batch-size 1 --global-batch-size 128 --train-samples 128000 --lr 0.00015 --min-lr 1e-5 --lr-decay-style
    cosine --lr-warmup-samples 1280 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B --data-path 0.7
    data/web_text_document 0.3 data/code_text_document --split 99,1,0 --eval-interval 100 --eval-iters 32
    --log-interval 10 --save checkpoints/llama3 --load checkpoints/llama3 --save-interval 500 --profile
    --profile-step-start 4 --profile-step-end 6
""".split()
MIXTRAL = """
    torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr node0 --master-port 6000 pretrain_gpt.py
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --use-rotary-position-embeddings --no-position-embedding --swiglu --disable-bias-linear
    --normalization RMSNorm --rotary-base 1000000 --untie-embeddings-and-output-weights --no-masked-softmax-fusion
    --seq-length 4096 --max-position-embeddings 32768 --attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 8
    --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-z-loss-coeff 1e-3 --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4 --expert-model-parallel-size 4 --tokenizer-type Llama2Tokenizer
    --tokenizer-model /models/mixtral-8x7b/tokenizer.model --train-data-path /data/a /data/b --valid-data-path 1
    /data/valid --recompute-granularity full --recompute-method block --recompute-num-layers 2 --ckpt-format torch
    --no-load-optim --finetune --load /checkpoints/mixtral --micro-batch-size 1 --global-batch-size 256
    --train-iters 1000 --lr 1e-4 --min-lr 1.0e-5 --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-iters
    500 --bf16
""".split()
DEEPSEEK_V2_LITE = """
    torchrun --nproc_per_node 8 pretrain_deepseek.py --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 2 --weight-decay 0.1
    --bf16 --init-method-std 0.008 --adam-beta1 0.9 --adam-beta2 0.95 --micro-batch-size 4 --global-batch-size 256
    --train-iters 50 --num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944
    --seq-length 4096 --max-position-embeddings 163840 --norm-epsilon 1e-6 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --position-embedding-type rope --rotary-base 10000 --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim
    0.707 --multi-latent-attention --qk-layernorm --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-router-pre-softmax
    --moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]*1+[1]*26) --moe-aux-loss-coeff 0.001
    --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type flex --moe-enable-deepep
    --moe-router-force-load-balancing --expert-model-parallel-size 8 --recompute-activations --exit-interval 20
    --tokenizer-type DeepSeekV2Tokenizer --tokenizer-model deepseek-ai/DeepSeek-V2-Lite --mock-data
""".split()
GPT_345M = """
    python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --model-parallel-size 1
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --save ck --load ck --data-path
    my-gpt2_text_document --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt --data-impl mmap --split
    949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --clip-grad 1.0 --warmup .01 --checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval
    1000 --eval-iters 10 --fp16 --attention-dropout 0 --hidden-dropout 0
""".split()
MODEL_FILES = {
    "llama_base.yaml": """
position_embedding_type: rope
normalization: RMSNorm
swiglu: true
add_bias_linear: false
untie_embeddings_and_output_weights: true
group_query_attention: true
hidden_dropout: 0.0
attention_dropout: 0.0
apply_rope_fusion: true
""",
    "llama3_base.yaml": "includes: llama_base.yaml\nrotary_base: 500000\n",
    "llama3_8B.yaml": """
bases:
  - llama3_base.yaml
tokenizer_type: Llama3Tokenizer
tokenizer_model: meta-llama/Llama-3.1-8B
ffn_hidden_size: 14336
hidden_size: 4096
num_attention_heads: 32
num_layers: 32
num_query_groups: 8
""",
    "llama3.1_8B.yaml": """
extends:
  - llama3_8B.yaml
max_position_embeddings: 131072
""",
    "mixtral_base.yaml": """
bases: [llama_base.yaml]
init_method_std: 0.01
rotary_base: 1000000
qk_layernorm: false
group_query_attention: true
num_query_groups: 8
num_experts: 8
moe_router_topk: 2
moe_router_load_balancing_type: aux_loss
moe_aux_loss_coeff: 1e-2
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
""",
    "mixtral_tiny.yaml": """
bases: [mixtral_base.yaml]
num_layers: 2
hidden_size: 64
num_attention_heads: 8
ffn_hidden_size: 96
tokenizer_type: NullTokenizer
vocab_size: 99
""",
}
"""Model files of Primus, by name."""
OVERRIDES = """
stderr_sink_level: DEBUG
log_avg_skip_iterations: 2
log_avg_reset_interval: 50
train_iters: 50
micro_batch_size: 2
global_batch_size: 128
seq_length: ${PRIMUS_SEQ_LENGTH:8192}
max_position_embeddings: 8192
lr: 1.0e-5
min_lr: 0.0
lr_warmup_iters: 2
lr_decay_iters: null
lr_decay_style: cosine
weight_decay: 0.1
adam_beta1: 0.9
adam_beta2: 0.95
eod_mask_loss: true
init_method_std: 0.008
norm_epsilon: 1.0e-6
mock_data: true
"""


def experiment(model: str, more: str = "", config: str = "pre_trainer.yaml") -> str:
    """An experiment of Primus."""
    lines = "\n".join(f"      {line}" for line in (OVERRIDES + more).strip().splitlines())
    return f"""
work_group: ${{PRIMUS_TEAM:amd}}
user_name: me
exp_name: first
workspace: ./output
modules:
  pre_trainer:
    framework: megatron
    config: {config}
    model: ${{PRIMUS_MODEL:{model}}}.yaml
    overrides:
{lines}
"""
